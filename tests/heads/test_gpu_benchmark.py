"""``benchmarks/gpu.py`` runs as it stands: every line but the CUDA ones, with tiny sizes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_a_dry_run_measures_loss_head_and_step():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--repeats", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    for name in ("energy_loss_torch_seconds", "head_seconds", "step_seconds", "step_tokens_per_s"):
        assert float(lines[name]) > 0
    assert lines["step_utilization"].startswith("MFU unavailable")
