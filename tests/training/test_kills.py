"""SIGKILL at random moments, a third of them during saves: the run ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from calm_scale.checkpoint.judge import inventory
from calm_scale.record import ledger
from calm_scale.record.metrics import read_metrics

TIMES = {"seconds", "cpu_seconds", "tokens_per_s", "time", "attempt"}
OPTIONS = {
    "training": {"steps": 40, "checkpoint": {"interval": 5, "keep_last": 2}, "eval_interval": 7},
    "engine": {"slow_step": 0.02, "slow_save": 0.2},
}


def record(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(run / "metrics.jsonl")]


def shards(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints/step_00000040/shards").iterdir()}


def saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.tmp/shards/*"))


def steps_done(run: Path) -> int:
    rows = read_metrics(run / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def committed(run: Path) -> int:
    return max((e.step for e in inventory(run) if e.state == "complete"), default=0)


def lives(run: Path) -> int:
    book = run / "ledger.jsonl"
    return sum(event.kind == "start" for event in ledger.history(book).events) if book.exists() else 0


@pytest.mark.ranks
def test_killed_again_and_again_with_background_saves(launch: Any, tmp_path: Path) -> None:
    """The synchronous save is killed in test_chaos.py, in the real engines."""
    chance = random.Random(0)
    options = OPTIONS | {
        "training": OPTIONS["training"] | {"checkpoint": {"interval": 5, "keep_last": 2, "async_save": True}}
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert launch(whole, **options).wait() == [0, 0]
    for kill in range(3):
        ranks = launch(run, **options)
        before = committed(run)
        if kill == 1:
            ranks.until(lambda before=before: committed(run) >= before + 5 and saving(run))
        else:
            ranks.until(lambda before=before, life=kill: lives(run) > life and steps_done(run) > before)
        time.sleep(chance.random() * 0.15)
        ranks.send(signal.SIGKILL, [chance.randrange(2)] if kill == 2 else None)
        ranks.wait()
        assert all(process.returncode != 0 for process in ranks.processes)
    assert launch(run, **options).wait() == [0, 0]
    assert record(run) == record(whole)
    assert shards(run) == shards(whole)
    starts = [e for e in ledger.history(run / "ledger.jsonl").events if e.kind == "start"]
    interval = 10  # a background save is not committed yet when the next one is due
    assert len(starts) == lives(run) == 4
    assert all(e.highest_step - e.first_step <= interval for e in starts[1:])
    assert not list((run / "checkpoints").glob("*.tmp"))
