"""A checkpoint is opened as the model that was trained, or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from calm_scale.checkpoint.card import Card, Counters
from calm_scale.config import ConfigError, RunConfig
from calm_scale.stages.model import refuse_other_model

BACKBONE = {"num_layers": 4, "hidden_size": 32, "ffn_size": 64, "num_heads": 4, "positions": 32}
HEADS: dict[str, dict[str, Any]] = {
    "energy": {"kind": "energy", "noise_size": 16},
    "diffusion": {"kind": "diffusion", "train_timesteps": 100},
    "softmax": {"kind": "softmax"},
}


def _run(of: str = "energy", **lm: Any) -> RunConfig:
    training = {"steps": 6, "global_batch": 8, "micro_batch": 4}
    section = {"backbone": BACKBONE, "head": HEADS[of], "training": training, **lm}
    document = {"name": "run", "workdir": "/run", "patch_size": 1 if of == "softmax" else 2, "lm": section}
    if of != "softmax":
        document["autoencoder"] = {"patches": 32, "training": training}
    return RunConfig.model_validate(document)


def _card(run: RunConfig) -> Card:
    return Card(
        stage="lm",
        run_id="run-a",
        config=run.model_dump(mode="json"),
        config_hash="c0ffee",
        patch_size=run.patch_size,
        vocab_size=run.vocab_size,
        tokenizer_fingerprint="tok",
        shards_fingerprint="shards",
        created=time.time(),
        counters=Counters(),
    )


@pytest.mark.parametrize(
    ("head", "field", "changed"),
    [
        ("energy", "backbone.num_heads", {"backbone": {**BACKBONE, "num_heads": 2}}),
        ("energy", "backbone.rope_theta", {"backbone": {**BACKBONE, "rope_theta": 5}}),
        ("energy", "backbone.norm_eps", {"backbone": {**BACKBONE, "norm_eps": 1e-3}}),
        ("energy", "backbone.num_query_groups", {"backbone": {**BACKBONE, "num_query_groups": 2}}),
        ("energy", "head.num_blocks", {"head": {**HEADS["energy"], "num_blocks": 2}}),
        ("energy", "head.noise_size", {"head": {**HEADS["energy"], "noise_size": 8}}),
        ("energy", "head.kind", {"head": {"kind": "flow"}}),
        ("energy", "input_mode", {"input_mode": "both"}),
        ("diffusion", "head.train_timesteps", {"head": {**HEADS["diffusion"], "train_timesteps": 50}}),
        ("softmax", "backbone.rope_theta", {"backbone": {**BACKBONE, "rope_theta": 5}}),
    ],
)
def test_another_model_is_refused_by_the_fields_name(head: str, field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"step_6: .*another model(.|\n)*lm.{field}: trained with "):
        refuse_other_model(_run(head, **changed), _card(_run(head)), Path("step_6"))


@pytest.mark.parametrize(
    "changed",
    [
        {"backbone": {**BACKBONE, "positions": 16, "init_std": 0.1}},
        {"backbone": {**BACKBONE, "num_query_groups": 4}},
        {"head": {**HEADS["energy"], "num_blocks": 1, "num_samples": 2, "num_posterior": 3, "alpha": 1.5}},
        {"training": {"steps": 60, "global_batch": 4, "micro_batch": 2}, "parallel": {"tensor": 2}},
    ],
)
def test_what_only_training_reads_may_differ(changed: dict[str, Any]) -> None:
    refuse_other_model(_run(**changed), _card(_run()), Path("step_6"))


def test_a_card_of_an_earlier_version_may_lack_a_field() -> None:
    card = _card(_run())
    del card.config["lm"]["backbone"]["norm_eps"]
    refuse_other_model(_run(), card, Path("step_6"))
