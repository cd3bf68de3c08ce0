"""The short form of ``benchmarks/chaos.py``: the real commands, killed in and between saves, end bit for bit equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "short"), [("lm", "lm"), ("autoencoder", "ae")])
def test_killed_and_equal(stage: str, short: str) -> None:
    command = [sys.executable, str(CHAOS), "--stage", stage, "--kills", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    numbers = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("chaos_"))
    assert numbers[f"chaos_{short}_kills"] == "2"
    assert numbers[f"chaos_{short}_bitwise"] == "1"
    assert int(numbers[f"chaos_{short}_max_steps_lost"]) <= int(numbers[f"chaos_{short}_interval"])
