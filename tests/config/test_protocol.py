"""The paper's scores stand only beside scores of the paper's text and protocol; files of earlier versions are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calm_scale.accounting.report.scores import own_and_others, scores, scores_section
from calm_scale.config import RunConfig, load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PROTOCOL = {"coverage": "first", "temperature": 1.0, "sampler": "plain, T = 1", "num_samples": 2, "seed": 0}


def _score(path: Path, **protocol: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"score": {"brierlm": 5.0}, "protocol": {**PROTOCOL, **protocol}}
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def run() -> RunConfig:
    return load(CONFIGS / "runs" / "calm-xl.yaml")


@pytest.mark.parametrize(
    ("protocol", "drawn"),
    [
        ({"provenance": {"text": "wikitext-103"}}, True),
        ({}, False),
        ({"provenance": {"text": "pile"}}, False),
        ({"provenance": {"text": "wikitext-103"}, "temperature": 0.5}, False),
        ({"provenance": {"text": "wikitext-103"}, "coverage": "all"}, False),
    ],
)
def test_crosses_are_drawn_only_beside_the_papers_text_and_protocol(
    run: RunConfig, tmp_path: Path, protocol: dict[str, Any], drawn: bool
) -> None:
    _score(tmp_path / "eval" / "step_00000010.json", **protocol)
    section = scores_section([(run, tmp_path)])
    assert section is not None
    assert ("Crosses are the paper's" in section.text[0]) is drawn
    assert ("CALM-M" in section.pictures[0].draw()) is drawn


def test_status_counts_the_protocols_apart_and_old_files_are_read(run: RunConfig, tmp_path: Path) -> None:
    _score(tmp_path / "eval" / "step_00000010.json")
    _score(tmp_path / "eval" / "first-S4-T1-all-seed0" / "step_00000010.json", num_samples=4)
    _score(tmp_path / "eval" / "data-01234567" / "step_00000020.json")
    bare = tmp_path / "eval" / "step_00000005.json"
    bare.write_text(json.dumps({"score": {"brierlm": None}}), encoding="utf-8")
    assert own_and_others(tmp_path) == (2, {"data-01234567": 1, "first-S4-T1-all-seed0": 1})
    found = scores(tmp_path)
    assert [score.step for score in found] == [5, 10, 20, 10]
    assert found[2].protocol.startswith("data-01234567, ")
    assert len({score.protocol for score in found}) == 4


def test_wikitext_is_laid_over_a_run_and_keeps_its_model_folder_and_tokenizer(run: RunConfig) -> None:
    scored = load(CONFIGS / "eval" / "calm-xl-wikitext103.yaml")
    assert (scored.name, scored.workdir, scored.tokenizer, scored.lm) == (
        run.name,
        run.workdir,
        run.tokenizer,
        run.lm,
    )
    assert scored.prep is not None and scored.data is not None and scored.data != run.data
    assert [path for source in scored.prep.sources for path in source.paths or ()] == [
        "wikitext-103/test.jsonl"
    ]
    assert (scored.prep.splits.heldout, scored.prep.splits.autoencoder) == (1.0, 0.0)
