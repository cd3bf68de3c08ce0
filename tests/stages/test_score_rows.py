"""`score` answers every text: with its score, or with the reason why it has none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calm_scale.config import ConfigError, RunConfig
from calm_scale.stages import texts as stage


class _Uniform:
    """A law of single tokens over two ids."""

    patch_size, vocab_size, device, shows = 1, 2, torch.device("cpu"), "probabilities"

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 1)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((*hidden.shape[:-1], 2), 0.5).log()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    tokenizer = SimpleNamespace(before_document=(0,), encode=lambda text: [1] * len(text))
    monkeypatch.setattr(stage, "trained_tokenizer", lambda *_: tokenizer)
    card = SimpleNamespace(config={"lm": {"head": {"kind": "softmax"}}})
    monkeypatch.setattr(stage, "open_model", lambda *_: SimpleNamespace(model=_Uniform(), card=card))
    backbone = {"num_layers": 1, "hidden_size": 8, "ffn_size": 8, "num_heads": 2, "positions": 4}
    training = {"steps": 6, "global_batch": 8, "micro_batch": 4}
    section = {"backbone": backbone, "head": {"kind": "softmax"}, "training": training}
    return RunConfig.model_validate({"name": "ar", "workdir": tmp_path, "patch_size": 1, "lm": section})


def test_a_text_beyond_the_context_has_a_reason(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """A BOS and four tokens are the longest text of four positions: the last token is scored, not read."""
    assert stage.run_scoring(run, texts=["a" * 4, "a" * 5, ""]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["cross-entropy", None, None]
    assert rows[0]["num_patches"] == 4
    assert "6 tokens need 5 patches of 1" in rows[1]["reason"] and "context has 4" in rows[1]["reason"]
    assert (rows[1]["per_token"], rows[1]["num_unscored"]) == (None, 6)
    assert "no whole patch" in rows[2]["reason"]


def test_only_texts_beyond_the_context_are_a_mistake(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="nothing to score: 6 tokens need 5 patches"):
        stage.run_scoring(run, texts=["a" * 5])


@pytest.mark.parametrize(
    ("head", "expected"), [({"kind": "energy", "alpha": 1.5}, 1.5), ({"kind": "flow", "num_repeats": 8}, 1.0)]
)
def test_texts_are_scored_with_the_alpha_that_the_model_was_trained_with(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: dict[str, Any], expected: float
) -> None:
    from calm_scale.evaluation.energy import TextScore

    given: list[float] = []

    def scored(_model: object, texts: list[Any], *, alpha: float, seed: int) -> list[TextScore]:
        given.append(alpha)
        return [TextScore("energy", 1.0, 0.5, 1, 2) for _ in texts]

    monkeypatch.setattr("calm_scale.evaluation.energy.score_texts", scored)
    card = SimpleNamespace(config={"lm": {"head": head}})
    monkeypatch.setattr(stage, "open_model", lambda *_: SimpleNamespace(model=_Uniform(), card=card))
    out = tmp_path / "rows.jsonl"
    assert stage.run_scoring(run, texts=["aaé"], out=out) == 0
    assert given == [expected]
    assert json.loads(out.read_text(encoding="utf-8"))["text"] == "aaé"
