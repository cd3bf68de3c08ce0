"""Timing and memory of a function, each measurement in a process of its own with a fixed number of threads."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

THREADS = 2


NOISE = 0.2
"""Interquartile range of a ratio's rounds over their median, above which the ratio is no figure."""


def seconds_by_round(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Wall seconds of each function in each round; a round runs all of them in turn, so that other load meets all."""
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            spent[name].append(time.perf_counter() - start)
    return spent


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of every round; infinite where a difference that must be positive is not."""
    return [a / b if b > 0 else math.inf for a, b in zip(numerators, denominators, strict=True)]


def say_ratio(name: str, of_rounds: Sequence[float], digits: int = 2) -> None:
    """The median of paired rounds with its quartiles, or that they differ too much to be a figure."""
    print(ratio_text(name, of_rounds, digits), flush=True)


def ratio_text(name: str, of_rounds: Sequence[float], digits: int = 2) -> str:
    """``name: median`` and a line of quartiles; ``name: too noisy`` instead of a number beyond :data:`NOISE`."""
    middle = statistics.median(of_rounds)
    low, _, high = (
        statistics.quantiles(of_rounds, n=4, method="inclusive") if len(of_rounds) > 1 else [middle] * 3
    )
    spread = f"quartiles {low:.{digits}f} to {high:.{digits}f} over {len(of_rounds)} rounds"
    if not (math.isfinite(middle) and middle > 0 and high - low <= NOISE * middle):
        return f"{name}: too noisy (median {middle:.{digits}f}, {spread}); measure again on an idle machine"
    return f"{name}: {middle:.{digits}f}\n  {name}, {spread}"


def peak_mib() -> float:
    """Highest resident size of this process so far, MiB."""
    return _status("VmHWM")


def extra_peak_mib(function: Callable[[], object]) -> float:
    """How far one call lifts the peak above the present resident size, MiB. Meaningful once a process.

    The peak is set back to the present size first: what imports once took must not hide what the call takes.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    function()
    return _status("VmHWM") - before


def in_a_process(script: Path, case: str) -> dict[str, Any]:
    """Run ``script --case CASE`` with ``THREADS`` threads and read the JSON of its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(
        [sys.executable, str(script), "--case", case],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"case {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")
