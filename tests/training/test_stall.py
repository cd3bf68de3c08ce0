"""A rank that hangs: the other's watchdog names stage and operation, and nobody is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calm_scale.config.errors import EXIT_STALLED
from calm_scale.record import ledger
from calm_scale.record.metrics import highest_step

PROGRAM = Path(__file__).with_name("train_tiny.py")
OPTIONS = {"training": {"steps": 100_000, "stall_seconds": 8.0}, "engine": {"stops_at": 3}}


def ranks_of(parent: int) -> dict[int, int]:
    """Process ids of a launcher's ranks, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            lineage = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            around = (path / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        rank = next((int(entry[5:]) for entry in around if entry.startswith(b"RANK=")), None)
        if lineage == parent and rank is not None:
            found[rank] = int(path.name)
    return found


def is_stopped(process: int | None) -> bool:
    """Whether SIGSTOP holds a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.ranks
def test_a_hanging_rank_ends_the_job_with_its_stage_and_operation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        "-m",
        "launchers.local",
        "--nproc",
        "2",
        "--end-others-within",
        "1",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    job = subprocess.Popen(
        [sys.executable, *command, "--", sys.executable, str(PROGRAM), str(run), json.dumps(OPTIONS)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
    )
    try:
        deadline = time.monotonic() + 90
        while not (ranks := ranks_of(job.pid)) or not is_stopped(ranks.get(1)):
            assert time.monotonic() < deadline, "rank 1 did not reach its third step"
            time.sleep(0.1)
        stopped = time.monotonic()
        said = job.communicate(timeout=90)[1]
        assert job.returncode == EXIT_STALLED
        assert time.monotonic() - stopped > 7, "it was given its time"  # rank 1 stopped up to a look earlier
        assert "rank 0: stalled: in `training step 3`" in said
        assert highest_step(run / "metrics.jsonl") == 2
        (dumped,) = (run / "collectives").glob("attempt_*.rank_0.json")
        last = json.loads(dumped.read_text())["entries"][-1]
        assert (last["profiling_name"], last["retired"]) == ("gloo:all_reduce", False)
        assert [event.cause for event in ledger.history(run / "ledger.jsonl").events][-1] == "stalled"
        assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()], (
            "no orphan holds the allocation"
        )
    finally:
        if job.poll() is None:
            job.kill()
