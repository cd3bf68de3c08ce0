"""What a node would find in its first minute is found by `config validate`, dry runs and `submit`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calm_scale.checkpoint.card import Card
from calm_scale.cli.app import app
from calm_scale.config import ConfigError, load
from calm_scale.config.run_folder import Stage
from calm_scale.stages.before_start import fingerprints

STORED = Path(__file__).with_name("stored_run")
Run = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, in the current folder."""
    copy = Path(shutil.copytree(STORED, tmp_path / "copy"))
    (copy / "cluster.yaml").write_text("cpus_per_node: 8\n")
    monkeypatch.chdir(copy)
    return copy


def said(*words: str, code: int = 0) -> str:
    """All that a command says; it ends with ``code``, by itself or by the error that `main` prints."""
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "300"})
    found = 2 if isinstance(done.exception, ConfigError) else done.exit_code
    text = f"{done.output}\n{done.exception if isinstance(done.exception, ConfigError) else ''}"
    assert found == code, text
    return text


LOOKS = (
    ("config", "validate", "tiny.yaml"),
    ("train-lm", "tiny.yaml", "--dry-run"),
    ("submit", "tiny.yaml", "--cluster", "cluster.yaml", "--dry-run"),
)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("prep.dtype=uint32", "prep.dtype is uint32, the shards have uint16"),
        ("prep.packing=aligned", "prep.packing is aligned, the shards have concat"),
        ("prep.alignment=16", "prep.alignment is 16, the shards have 8"),
        ("tokenizer.add_bos=false", "tokenizer.add_bos is False, the shards have True"),
        ("vocab_size=100", "set vocab_size to at least"),
    ],
)
def test_shards_that_the_document_would_not_make_are_refused(folder: Path, setting: str, words: str) -> None:
    for look in LOOKS:
        assert words in said(*look, "--set", setting, code=2)
    from calm_scale.stages.train import train

    with pytest.raises(ConfigError, match=words):
        train(load("tiny.yaml", [setting]), Stage.LM)


def test_shards_that_another_document_made_are_stated(folder: Path) -> None:
    shutil.copytree("run/data", "elsewhere")
    for look in LOOKS:
        text = said(*look, "--set", "data=elsewhere", "--set", "prep.dtype=uint32")
        assert "note: elsewhere/train: prep.dtype is uint32, the shards have uint16" in text


def test_a_split_that_nobody_makes_is_refused_or_stated(folder: Path) -> None:
    shutil.rmtree("run/data")
    for look in LOOKS[::2]:
        text = said(*look, "--set", "autoencoder.split=autoencoder", code=2)
        assert "prep.splits gives autoencoder no share of the documents; set prep.splits.autoencoder" in text
        assert "set prep.splits.heldout or `eval` will fail" in said(*look, "--set", "prep.splits.heldout=0")


def test_an_autoencoder_of_another_run_is_refused_before_its_stage_is_left_out(folder: Path) -> None:
    card = json.loads(Path("run/autoencoder/export/card.json").read_text())
    Path("run/autoencoder/export/card.json").write_text(
        json.dumps({**card, "tokenizer_fingerprint": "another"})
    )
    assert "tokenizer is another, the run has" in said("train-lm", "tiny.yaml", "--dry-run", code=2)


def test_a_tokenizer_that_does_not_fit_is_found_before_prep_is_queued(folder: Path) -> None:
    shutil.rmtree("run/data")
    for look in LOOKS[::2]:
        assert "set vocab_size to at least 512" in said(*look, "--set", "vocab_size=100", code=2)


def test_validation_and_training_ask_one_function_whether_a_run_may_go_on(folder: Path) -> None:
    config = load("tiny.yaml")
    for stage, step in (("autoencoder", "step_00000600"), ("lm", "step_00000200")):
        card = Card.read(Path("run") / stage / "checkpoints" / step)
        assert fingerprints(config, stage) == card.fingerprints, "what the training saw, seen from here"
    resume = ("config", "validate", "tiny.yaml", "--resume", "run")
    assert "This run may resume." in said(*resume)
    shutil.rmtree("run/data/train")
    shutil.copytree("run/data/heldout", "run/data/train")
    text = said(*resume, code=2)
    assert "shards_fingerprint" in text
    assert "cannot resume with these changes" in text
    for look in LOOKS[1:]:
        assert "shards_fingerprint" in said(*look, code=2), "dry runs and `submit` ask it too"
    shutil.rmtree("run/data")
    assert "This run may resume." in said(*resume), "a login node without the data compares the document"


def test_a_dry_run_takes_the_changes_that_are_accepted(folder: Path) -> None:
    look = ("train-lm", "tiny.yaml", "--dry-run", "--set", "lm.training.optimizer.weight_decay=0.3")
    assert "--accept lm.training.optimizer.weight_decay" in said(*look, code=2)
    said(*look, "--accept", "lm.training.optimizer.weight_decay")
