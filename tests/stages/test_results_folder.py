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


def test_another_protocol_than_the_runs_has_a_folder_of_its_name(tmp_path: Path) -> None:
    own = {"max_sequences": 256, "num_samples": 8}
    run = _run(tmp_path / "run", evaluation=own)
    card = _card(run)
    sharper = _run(tmp_path / "run", evaluation={**own, "temperature": 1 / 3, "num_candidates": 50})
    fewer = _run(tmp_path / "run", evaluation={**own, "max_sequences": 8})
    not_protocol = _run(tmp_path / "run", evaluation={**own, "batch_size": 3, "bootstrap": 100})
    unused_at_one = _run(tmp_path / "run", evaluation={**own, "num_candidates": 7, "algorithm": "exact"})
    folder = tmp_path / "run" / "eval"
    for same in (run, not_protocol, unused_at_one):
        assert results_folder(same, card, "0123456789") == folder
    assert results_folder(sharper, card, "0123456789") == folder / "first-S8-T0.333333-batch-N50-n256-seed0"
    assert results_folder(fewer, card, "0123456789") == folder / "first-S8-T1-n8-seed0"
    elsewhere = _run(tmp_path / "run", data=tmp_path / "other", evaluation={**own, "seed": 1})
    assert (
        results_folder(elsewhere, card, "0123456789") == folder / "data-01234567" / "first-S8-T1-n256-seed1"
    )


def test_a_card_of_an_earlier_version_has_the_defaults(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    card = _card(run)
    kept = {key: value for key, value in card.config.items() if key != "evaluation"}
    old = card.model_copy(update={"config": kept})
    assert results_folder(run, old, "0123456789") == tmp_path / "run" / "eval"


def test_data_named_relative_to_where_a_run_was_started_are_its_own(tmp_path: Path) -> None:
    """Evaluated from another folder, the document names the run's data by another path than its card."""
    card = _card(RunConfig.model_validate({"name": "run", "workdir": "runs/run", "data": "text"}))
    run = _run(tmp_path / "runs" / "run", data=tmp_path / "text")
    assert results_folder(run, card, "0123456789") == tmp_path / "runs" / "run" / "eval"
