"""``benchmarks/gpu.py`` runs as it stands: every line but the CUDA ones, with tiny sizes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_a_dry_run_measures_device_loss_head_and_step(tmp_path: Path) -> None:
    measured = tmp_path / "measured.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--repeats", "1", "--json", str(measured)],
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
    rates = json.loads(measured.read_text())
    names = {"products_per_second", "attention_per_second", "copy_bytes_per_second"}
    assert rates.keys() == {"device"} | names
    assert all(rates[name] > 0 for name in names)
