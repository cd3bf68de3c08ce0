"""Scores of other data never take the place of the run's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from calm_scale.checkpoint.card import Card, Counters
from calm_scale.config import RunConfig
from calm_scale.stages.evaluate import results_folder


def _run(folder: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "run", "workdir": folder, **more})


def _card(run: RunConfig) -> Card:
    return Card(
        stage="lm",
        run_id="run-a",
        config=run.model_dump(mode="json"),
        config_hash="c0ffee",
        patch_size=4,
        vocab_size=1024,
        tokenizer_fingerprint="tok",
        shards_fingerprint="shards",
        created=time.time(),
        counters=Counters(),
    )


def test_only_the_runs_own_split_takes_its_name(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    moved = _run(tmp_path / "moved")
    other_data = _run(tmp_path / "run", data=tmp_path / "other")
    other_split = _run(tmp_path / "run", evaluation={"split": "train"})
    card = _card(run)
    assert results_folder(run, card, "0123456789") == tmp_path / "run" / "eval"
    assert results_folder(moved, card, "0123456789") == tmp_path / "moved" / "eval"
    for other in (other_data, other_split):
        assert results_folder(other, card, "0123456789") == tmp_path / "run" / "eval" / "data-01234567"
