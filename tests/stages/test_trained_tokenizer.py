"""A model continues and scores texts under the tokenizer settings of the shards it was trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from calm_scale.checkpoint.judge import find
from calm_scale.config import load
from calm_scale.runtime.world import World
from calm_scale.stages.evaluate import _say_other_ids
from calm_scale.stages.model import trained_tokenizer
from calm_scale.stages.splits import as_prepared
from data_prep.shards.manifest import Manifest

STORED = Path(__file__).with_name("stored_run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, in the current folder."""
    copy = Path(shutil.copytree(STORED, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def solo() -> World:
    return World(0, 1, 0, 1, torch.device("cpu"), "gloo")


def test_what_training_stores_says_how_the_shards_were_made(folder: Path) -> None:
    made = Manifest.read(folder / "run/data/train")
    stated = made.provenance | {"tokenizer": {"encoder": "tokenizers", "bos_token": "<|end_of_text|>"}}
    elsewhere = made.model_copy(update={"add_bos": False, "add_eos": True, "provenance": stated})
    config = load("tiny.yaml")
    tokenizer = as_prepared(config, elsewhere).tokenizer
    assert (tokenizer.add_bos, tokenizer.add_eos) == (False, True)
    assert (tokenizer.encoder, tokenizer.bos_token) == ("tokenizers", "<|end_of_text|>")
    assert tokenizer.path == config.tokenizer.path
    assert as_prepared(config, made) == config, "a run whose own prep made them keeps its document"


def test_the_document_of_a_trained_model_does_not_change_its_policy(
    folder: Path, solo: World, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = load("tiny.yaml", ["tokenizer.add_bos=false"])
    assert trained_tokenizer(asked, solo).add_bos
    assert (
        "tokenizer.add_bos is False in the document, but the model was trained with True"
        in capsys.readouterr().err
    )
    assert trained_tokenizer(load("tiny.yaml"), solo).add_bos
    assert capsys.readouterr().err == ""


def test_an_imported_model_takes_the_policy_of_its_document(
    folder: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = find(folder / "run/lm").card
    assert card is not None
    imported = SimpleNamespace(card=card.model_copy(update={"shards_fingerprint": ""}))
    monkeypatch.setattr("calm_scale.stages.model.find", lambda *_: imported)
    assert not trained_tokenizer(load("tiny.yaml", ["tokenizer.add_bos=false"]), solo).add_bos


def test_scores_of_data_with_other_ids_say_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = SimpleNamespace(split_dir=Path("d"), manifest=SimpleNamespace(tokenizer_fingerprint="a"))
    for ours, said in (("b", True), ("a", False), ("", False)):
        _say_other_ids(split, SimpleNamespace(tokenizer_fingerprint=ours))
        assert ("prepared with another tokenizer or BOS/EOS policy" in capsys.readouterr().err) == said
