"""What an evaluation leaves: whole files in the place that was asked for, whoever reads the output."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calm_scale.checkpoint.card import Card, Counters
from calm_scale.config import RunConfig
from calm_scale.lm.heads.denoising import FlowHeadConfig
from calm_scale.stages import evaluate as stage
from calm_scale.stages.model import OpenModel

_laws = Path(__file__).parents[1] / "evaluation" / "conftest.py"
_spec = importlib.util.spec_from_file_location("laws", _laws)
assert _spec is not None and _spec.loader is not None
laws = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(laws)

CHAIN = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.3, 0.1, 0.6]])


class _Split(list[Any]):
    fingerprint = "0123456789abcdef"
    manifest = SimpleNamespace(bos_id=None, add_bos=False, pad_id=None, tokenizer_fingerprint="tok")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A baseline of a known law; nothing of it is read from the disk."""
    config = RunConfig.model_validate(
        {
            "name": "ar",
            "workdir": tmp_path / "run",
            "patch_size": 1,
            "lm": {
                "backbone": {
                    "num_layers": 1,
                    "hidden_size": 8,
                    "ffn_size": 8,
                    "num_heads": 2,
                    "positions": 40,
                },
                "head": {"kind": "softmax"},
                "training": {"steps": 6, "global_batch": 8, "micro_batch": 4},
            },
            "evaluation": {"bootstrap": 100},
        }
    )
    card = Card(
        stage="lm",
        run_id="run-a",
        config=config.model_dump(mode="json"),
        config_hash="c0ffee",
        patch_size=1,
        vocab_size=3,
        tokenizer_fingerprint="tok",
        shards_fingerprint="shards",
        created=time.time(),
        counters=Counters(steps=7),
    )
    model = laws.MarkovModel(CHAIN, 1)
    monkeypatch.setattr(stage, "open_split", lambda *_, **__: _Split(model.sequences(4, 40)))
    monkeypatch.setattr(stage, "make_ready", lambda _config, dataset, _world: dataset)
    monkeypatch.setattr(stage, "open_model", lambda *_: OpenModel(model, card))
    return config


def test_the_exact_result_goes_where_the_sampled_one_goes(run: RunConfig, tmp_path: Path) -> None:
    assert stage.run_evaluation(run, json_file=tmp_path / "out" / "mine.json") == 0
    assert _names(tmp_path / "out") == ["exact_mine.json", "mine.json"]
    assert not run.workdir.exists()
    assert stage.run_evaluation(run) == 0
    assert _names(run.workdir / "eval") == ["exact_00000007.json", "step_00000007.json"]
    sampled, exact = (
        json.loads((run.workdir / "eval" / f"{name}_00000007.json").read_text()) for name in ("step", "exact")
    )
    assert len(exact["components"]) == 4
    shared = ("provenance", "num_sequences", "block_tokens", "seed", "num_samples")
    assert {k: exact["protocol"][k] for k in shared} == {k: sampled["protocol"][k] for k in shared}
    assert exact["protocol"]["provenance"]["data"] == _Split.fingerprint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_full_or_closed_output_does_not_cost_the_result(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises((OSError, SystemExit)):
        stage.run_evaluation(run, json_file=tmp_path / "mine.json")
    monkeypatch.undo()
    for name in ("mine.json", "exact_mine.json"):
        assert json.loads((tmp_path / name).read_text())["protocol"]


@pytest.mark.parametrize("broken", ["mine.json", "exact_mine.json"])
def test_a_full_disk_leaves_nothing_half_written(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith(f".{broken}."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        stage.run_evaluation(run, json_file=tmp_path / "mine.json")
    assert broken not in _names(tmp_path)
    assert not [name for name in _names(tmp_path) if name.endswith((".tmp", ".part"))]


def test_the_walk_of_a_flow_head_is_part_of_the_provenance(run: RunConfig) -> None:
    assert run.lm is not None
    assert stage._walk_of(run.lm) == {}
    flow = run.lm.model_copy(update={"head": FlowHeadConfig(sampling_steps=6)})
    assert stage._walk_of(flow) == {"sampling_steps": "6"}


def test_a_second_protocol_leaves_the_runs_own_score(run: RunConfig) -> None:
    from calm_scale.accounting.report.scores import scores_section

    assert stage.run_evaluation(run) == 0
    own = (run.workdir / "eval" / "step_00000007.json").read_bytes()
    other = run.evaluation.model_copy(update={"num_samples": 4, "max_sequences": 2})
    assert stage.run_evaluation(run.model_copy(update={"evaluation": other})) == 0
    assert (run.workdir / "eval" / "step_00000007.json").read_bytes() == own
    assert _names(run.workdir / "eval" / "first-S4-T1-n2-b40-seed0") == [
        "exact_00000007.json",
        "step_00000007.json",
    ]
    section = scores_section([(run, run.workdir)])
    assert section is not None
    rows = [
        dict(zip((c.key for c in section.tables[0].columns), row, strict=True))
        for row in section.tables[0].rows
    ]
    assert [("S 2" in str(row["protocol"]), "S 4" in str(row["protocol"])) for row in rows] == [
        (True, False),
        (False, True),
    ]
    assert len(section.pictures) == 2 and len({picture.key for picture in section.pictures}) == 2


def test_a_device_takes_the_sampled_result_and_the_exact_one_goes_to_the_run(run: RunConfig) -> None:
    assert stage.run_evaluation(run, json_file=Path(os.devnull)) == 0
    assert Path(os.devnull).is_char_device()
    assert _names(run.workdir / "eval") == ["exact_00000007.json"]
