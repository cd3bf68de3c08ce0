"""Damage that one rank sees is every rank's verdict, within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calm_scale.checkpoint.judge import inventory

SHARD = "shards/rank_1.safetensors"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda step: (step / SHARD).unlink(),
    "cut": lambda step: os.truncate(step / SHARD, 50),
    "flipped": lambda step: (step / SHARD).write_bytes((step / SHARD).read_bytes()[:-1] + b"\x7f"),
}


@pytest.mark.ranks
def test_two_ranks_reach_one_verdict(launch: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"training": {"steps": 12, "checkpoint": {"interval": 3, "keep_last": 9}}}
    assert launch(run, **options, stop_after=9).wait() == [75, 75]
    for step, damage in zip((9, 6), DAMAGE.values(), strict=False):
        damage(run / f"checkpoints/step_{step:08d}")
    started = time.monotonic()
    ranks = launch(run, **options)
    assert ranks.wait() == [0, 0]
    assert time.monotonic() - started < 60
    assert "resumed at step 3" in ranks.text()
    assert "passed over step_00000009: shards/rank_1.safetensors: no such file" in ranks.text()
    assert "passed over step_00000006: shards/rank_1.safetensors: 50 bytes instead of" in ranks.text()
    aside = sorted(path.name.split("-")[0] for path in (run / "checkpoints").glob("*damaged*"))
    assert aside == ["step_00000006.damaged", "step_00000009.damaged"]
    for entry in inventory(run):
        DAMAGE["flipped"](entry.path)
    ranks = launch(run, **options)
    assert ranks.wait() == [1, 1]
    assert ranks.logs[0].read_text().count("not starting again over them") == 1
    assert ranks.logs[1].read_text().count("not starting again over them") == 1
