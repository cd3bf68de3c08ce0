"""`calm-scale score`: how well texts fit a model, without a likelihood (lower is better)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.runtime.world import init_world
from calm_scale.stages.json_lines import given_texts
from calm_scale.stages.model import open_model, refuse_spare_ranks


def run_scoring(
    config: RunConfig,
    *,
    texts: Sequence[str],
    jsonl: Path | None = None,
    step: int | None = None,
    tensor: int = 1,
) -> int:
    """Print one JSON line a text: the energy score per patch and per token (cross-entropy for the baseline).

    A text too short to score gets nulls and the reason.

    Raises:
        ConfigError: every text is too short.
    """
    from calm_scale.evaluation.energy import score_texts, too_short
    from data_prep.tokenizer import load_tokenizer

    wanted = given_texts(texts, jsonl, "text")
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    world = init_world()
    try:
        refuse_spare_ranks(world, tensor, "score")
        opened = open_model(config, world, step, tensor, tokenizer)
        ids = [[*bos, *tokenizer.encode(text)] for text in wanted]
        reasons = [too_short(len(tokens), config.patch_size) for tokens in ids]
        if all(reasons):
            raise ConfigError(f"nothing to score: {reasons[0]}; give a longer text")
        long_enough = [tokens for tokens, why in zip(ids, reasons, strict=True) if why is None]
        scores = iter(score_texts(opened.model, long_enough, seed=config.seed))
        for text, tokens, why in zip(wanted, ids, reasons, strict=True) if world.is_first else ():
            row = asdict(next(scores)) if why is None else _unscored(len(tokens), why)
            sys.stdout.write(json.dumps({"text": text, **row}, ensure_ascii=False) + "\n")
        return EXIT_OK
    finally:
        world.close()


def _unscored(num_tokens: int, why: str) -> dict[str, Any]:
    """The row of a text that is too short."""
    empty = {"kind": None, "per_patch": None, "per_token": None, "num_patches": 0, "num_unscored": num_tokens}
    return {**empty, "reason": why}
