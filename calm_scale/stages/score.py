"""`calm-scale score`: how well texts fit a model, without a likelihood (lower is better)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calm_scale.checkpoint.card import Card
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.runtime.departure import joined
from calm_scale.stages.json_lines import given_texts, write_lines
from calm_scale.stages.model import open_model, refuse_spare_ranks, trained_tokenizer


def run_scoring(
    config: RunConfig,
    *,
    texts: Sequence[str],
    jsonl: Path | None = None,
    out: Path | None = None,
    step: int | None = None,
    tensor: int = 1,
) -> int:
    """Print, or write to ``out``, one JSON line a text: the energy score per patch and per token.

    The score is the training loss, with the run's ``alpha``; the baseline's is its cross-entropy.

    A text too short to score, or longer than the model's context, gets nulls and the reason.

    Raises:
        ConfigError: no text can be scored.
    """
    from calm_scale.evaluation.energy import score_texts

    with joined("score", device=config.device, join_seconds=config.join_minutes * 60) as departure:
        world = departure.world
        world.on_first(lambda: refuse_spare_ranks(world, tensor, "score"))
        wanted = world.on_first(lambda: given_texts(texts, jsonl, "text"))
        tokenizer = trained_tokenizer(config, world, step)
        opened = open_model(config, world, step, tensor, tokenizer)
        ids = [[*tokenizer.before_document, *tokenizer.encode(text)] for text in wanted]
        reasons = [_unfit(config, len(tokens)) for tokens in ids]
        if all(reasons):
            raise ConfigError(f"nothing to score: {reasons[0]}; give a text of another length")
        fitting = [tokens for tokens, why in zip(ids, reasons, strict=True) if why is None]
        scores = iter(score_texts(opened.model, fitting, alpha=_alpha(opened.card), seed=config.seed))
        rows = [
            {"text": text, **(asdict(next(scores)) if why is None else _unscored(len(tokens), why))}
            for text, tokens, why in zip(wanted, ids, reasons, strict=True)
        ]
        if world.is_first:
            write_lines(rows, out)
        return EXIT_OK


def _alpha(card: Card) -> float:
    """The exponent of the energy loss the model was trained with; 1 for a head that is trained otherwise."""
    head = card.config["lm"]["head"]
    return float(head["alpha"]) if head["kind"] == "energy" else 1.0


def _unfit(config: RunConfig, num_tokens: int) -> str | None:
    """Why a text of so many tokens cannot be scored, or None."""
    from calm_scale.evaluation.energy import too_long, too_short

    k = config.patch_size
    return too_short(num_tokens, k) or too_long(num_tokens, k, config.require_lm().backbone.positions)


def _unscored(num_tokens: int, why: str) -> dict[str, Any]:
    """The row of a text that is too short or too long."""
    empty = {"kind": None, "per_patch": None, "per_token": None, "num_patches": 0, "num_unscored": num_tokens}
    return {**empty, "reason": why}
