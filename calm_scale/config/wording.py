"""Words that follow a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2,000 ranks``: the number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
