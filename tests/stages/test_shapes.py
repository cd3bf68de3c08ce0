"""A document that looks right is refused by validation, or it builds and trains: there is no third end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calm_scale.config import RunConfig

pytestmark = pytest.mark.ranks
PROGRAM = Path(__file__).with_name("shapes_program.py")


@pytest.mark.parametrize(
    ("stage", "num_ranks", "examples"), [("autoencoder", 1, 12), ("lm", 1, 20), ("lm", 2, 12)]
)
def test_a_random_document_is_refused_or_trains(
    run_ranks: Callable[..., Any], stage: str, num_ranks: int, examples: int
) -> None:
    ranks = run_ranks(PROGRAM, stage, str(examples), "0", num_ranks=num_ranks, timeout=240)
    for code, _, errors in ranks:
        assert code == 0, errors[-6000:]
    ends = json.loads(ranks[0][1].splitlines()[-1])
    assert ends["trained"] + ends["refused"] == examples
    assert min(ends["trained"], ends["refused"]) >= examples // 6, ends


BACKBONE = {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "positions": 16}
TRAINING = {"steps": 1, "global_batch": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": {"hidden_size": 60}}, "heads of width 15: rotary embeddings turn pairs"),
        ({"backbone": {"hidden_size": 60}, "head": {"kind": "softmax"}}, "heads of width 15"),
        (
            {"backbone": {"num_query_groups": 2}, "parallel": {"tensor": 4}},
            "query groups 2 is not divisible by",
        ),
        ({"parallel": {"pipeline": 2, "pipeline_layout": [0, 4]}}, "pipeline_layout"),
        ({"parallel": {"pipeline": 2, "pipeline_layout": [-1, 5]}}, "pipeline_layout"),
        ({"parallel": {"pipeline": 2, "virtual_pipeline": 2, "data": 8}}, "micro-batches per step"),
    ],
)
def test_a_shape_that_the_modules_cannot_take_is_refused(changes: dict[str, Any], words: str) -> None:
    lm = {"backbone": BACKBONE | changes.pop("backbone", {}), "training": TRAINING, **changes}
    patch_size = 1 if changes.get("head", {}).get("kind") == "softmax" else 2
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"name": "r", "patch_size": patch_size, "lm": lm})


def test_a_batch_that_does_not_spread_over_the_autoencoders_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the nearest that fit are 6 and 9"):
        RunConfig.model_validate({"name": "r", "autoencoder": {"training": TRAINING, "zero": {"data": 3}}})
