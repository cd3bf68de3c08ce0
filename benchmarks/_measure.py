"""Timing and memory of a function, each measurement in a process of its own with a fixed number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

THREADS = 2


def best_seconds(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least wall seconds of each function over ``repeats`` rounds; a round runs all of them in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


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


def in_a_process(script: Path, case: str) -> dict[str, float]:
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
