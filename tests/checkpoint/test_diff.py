"""What may change between a checkpoint and the run that resumes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calm_scale.checkpoint.card import Card, Identity
from calm_scale.checkpoint.diff import resume_diff
from calm_scale.checkpoint.errors import ResumeRefusedError
from calm_scale.config import RunConfig
from calm_scale.config.data import TokenizerConfig
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer.definition import train_bpe

BASE: dict[str, Any] = {
    "name": "run",
    "vocab_size": 1024,
    "patch_size": 4,
    "lm": {
        "head": {"kind": "energy"},
        "backbone": {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "positions": 16},
        "training": {"steps": 100, "global_batch": 8},
    },
    "autoencoder": {"training": {"steps": 10, "global_batch": 4}},
}


def document(*changes: str) -> dict[str, Any]:
    import copy

    import yaml

    raw = copy.deepcopy(BASE)
    for change in changes:
        path, _, value = change.partition("=")
        *parents, leaf = path.split(".")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = yaml.safe_load(value)
    return RunConfig.model_validate(raw).model_dump(mode="json")


@pytest.fixture
def card(card_of: Callable[..., Card]) -> Card:
    return card_of(10, config=document())


CASES = [
    ("lm.parallel.tensor=2", "lm.parallel.tensor", "safe"),
    ("lm.parallel.distributed_optimizer=false", "lm.parallel.distributed_optimizer", "safe"),
    ("lm.training.micro_batch=2", "lm.training.micro_batch", "safe"),
    ("lm.training.steps=200", "lm.training.steps", "safe"),
    ("lm.training.checkpoint.interval=7", "lm.training.checkpoint.interval", "safe"),
    ("logging.interval=3", "logging.interval", "safe"),
    ("deterministic=true", "deterministic", "safe"),
    ("lm.training.optimizer.lr=0.001", "lm.training.optimizer.lr", "results"),
    ("lm.training.global_batch=16", "lm.training.global_batch", "results"),
    ("lm.training.precision=fp32", "lm.training.precision", "results"),
    ("lm.head.num_samples=4", "lm.head.num_samples", "results"),
    ("lm.head.alpha=1.5", "lm.head.alpha", "results"),
    ("lm.backbone.hidden_size=32", "lm.backbone.hidden_size", "forbidden"),
    ("lm.backbone.num_query_groups=2", "lm.backbone.num_query_groups", "forbidden"),
    ("lm.head.noise_size=32", "lm.head.noise_size", "forbidden"),
    ("vocab_size=2048", "vocab_size", "forbidden"),
    ("seed=1", "seed", "forbidden"),
]


@pytest.mark.parametrize(("change", "field", "verdict"), CASES)
def test_one_field(change: str, field: str, verdict: str, card: Card) -> None:
    diff = resume_diff(card, document(change), "lm")
    assert [(c.field, c.verdict) for c in diff.changes] == [(field, verdict)]
    if verdict == "safe":
        diff.check()
    elif verdict == "results":
        with pytest.raises(ResumeRefusedError, match=f"--accept {field}"):
            diff.check()
        diff.check(accept=[field])
    else:
        with pytest.raises(ResumeRefusedError, match="forbidden"):
            diff.check(accept=[field])


def test_the_same_document_has_no_changes(card: Card) -> None:
    diff = resume_diff(card, document(), "lm")
    assert diff.changes == () and diff.num_same > 60


def test_more_steps_change_a_decaying_schedule(card_of: Callable[..., Card]) -> None:
    cosine = "lm.training.optimizer.schedule.kind=cosine"
    diff = resume_diff(card_of(10, config=document(cosine)), document(cosine, "lm.training.steps=200"), "lm")
    assert [c.verdict for c in diff.changes] == ["results"]


def test_the_other_stage_is_judged_by_its_fingerprint(card: Card) -> None:
    assert resume_diff(card, document("autoencoder.training.steps=99"), "lm").changes == ()
    identity = Identity.model_validate(
        {name: getattr(card, name) for name in Identity.model_fields} | {"autoencoder_fingerprint": "new"}
    )
    diff = resume_diff(card, document(), "lm", identity.fingerprints)
    assert [(c.field, c.verdict) for c in diff.changes] == [("autoencoder_fingerprint", "forbidden")]


def test_another_tokenizer_is_another_run(card_of: Callable[..., Card], tmp_path: Path) -> None:
    corpus = tmp_path / "text.jsonl"
    corpus.write_text('{"text": "a small text about the sea and the sand beside it"}\n' * 9, encoding="utf-8")
    one, two = (train_bpe([corpus], size, tmp_path / f"{size}.json") for size in (260, 270))
    trained = card_of(
        10,
        config=document(f"tokenizer.path={one}"),
        tokenizer_fingerprint=load_tokenizer(TokenizerConfig(), one).fingerprint,
    )
    copy = shutil.copy(one, tmp_path / "copy.json")
    diff = resume_diff(trained, document(f"tokenizer.path={copy}"), "lm")
    assert [(c.field, c.verdict) for c in diff.changes] == [("tokenizer.path", "safe")]
    for other, words in (
        (two, trained.tokenizer_fingerprint),
        (tmp_path / "none", "there is no tokenizer at"),
    ):
        refused = resume_diff(trained, document(f"tokenizer.path={other}"), "lm").refused()
        assert [change.field for change in refused] == ["tokenizer", "tokenizer.path"]
        assert words in str(refused[0])


def test_another_head_is_another_model(card: Card) -> None:
    with pytest.raises(ResumeRefusedError, match=r"lm\.head\.kind: 'energy' → 'flow'"):
        resume_diff(card, document("lm.head={kind: flow}"), "lm").check()


def test_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import calm_scale.checkpoint.diff, calm_scale.checkpoint.judge, calm_scale.checkpoint.status, "
        "calm_scale.checkpoint.targets, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
