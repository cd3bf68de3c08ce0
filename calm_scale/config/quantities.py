"""Quantities as text for a reader: counts with their nouns, FLOPs, bytes and seconds in a fitting unit."""

from __future__ import annotations

from collections.abc import Sequence

LARGE_FLOPS = 1e18


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2,000 ranks``: the number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def scaled(value: float, units: Sequence[str], step: float = 1000.0) -> str:
    """Three significant digits with the fitting prefix: ``scaled(1.5e9, ("", "k", "M", "G"))`` → ``1.50 G``."""
    index, size = 0, abs(value)
    while size >= step * 0.9995 and index < len(units) - 1:
        size, index = size / step, index + 1
    digits = 0 if size >= 99.95 or (index == 0 and size == int(size)) else 1 if size >= 9.995 else 2
    unit = units[index]
    return f"{'-' if value < 0 else ''}{size:.{digits}f}" + (f" {unit}" if unit else "")


def flops_text(value: float) -> str:
    """Large FLOPs as the paper writes them (``3.56e20``), small ones with a prefix."""
    if abs(value) < LARGE_FLOPS:
        return scaled(value, ("", "k", "M", "G", "T", "P"))
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def bytes_text(value: float) -> str:
    """Bytes in binary units."""
    return scaled(value, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024.0)


def seconds_text(value: float) -> str:
    """A duration in the unit one would say it in."""
    for limit, divisor, unit in (
        (1.0, 1e-3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 60.0, "min"),
        (172800.0, 3600.0, "h"),
    ):
        if value < limit:
            return f"{value / divisor:.3g} {unit}"
    return f"{value / 86400:.3g} days"
