"""`calm-scale score`: how well texts fit a model, without a likelihood (lower is better)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from calm_scale.config import RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.runtime.world import init_world
from calm_scale.stages.json_lines import read_texts
from calm_scale.stages.model import open_model, refuse_spare_ranks


def run_scoring(
    config: RunConfig,
    *,
    texts: Sequence[str],
    jsonl: Path | None = None,
    step: int | None = None,
    tensor: int = 1,
) -> int:
    """Print one JSON line a text: the energy score per patch and per token (cross-entropy for the baseline)."""
    from calm_scale.evaluation.energy import score_texts
    from data_prep.tokenizer import load_tokenizer

    wanted = [*texts, *(read_texts(jsonl, "text") if jsonl else [])]
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    world = init_world()
    try:
        refuse_spare_ranks(world, tensor, "score")
        opened = open_model(config, world, step, tensor)
        ids = [[*bos, *tokenizer.encode(text)] for text in wanted]
        scores = score_texts(opened.model, ids, seed=config.seed)
        for text, score in zip(wanted, scores, strict=True) if world.is_first else ():
            sys.stdout.write(json.dumps({"text": text, **asdict(score)}, ensure_ascii=False) + "\n")
        return EXIT_OK
    finally:
        world.close()
