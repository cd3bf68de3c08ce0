"""A configuration small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from calm_scale.config.run import RunConfig

MakeRun = Callable[..., RunConfig]


def make_run(
    *,
    vocab_size: int = 96,
    patch_size: int = 4,
    backbone: dict[str, Any] | None = None,
    head: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    autoencoder: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **lm: Any,
) -> RunConfig:
    shape = {"num_layers": 2, "hidden_size": 16, "ffn_size": 40, "num_heads": 4, "positions": 8}
    stage = {"patches": 8, "training": {"steps": 5, "global_batch": 4, "precision": "fp32"}} | (
        autoencoder or {"model": {"hidden_size": 8, "ffn_size": 20, "latent_size": 12}}
    )
    return RunConfig.model_validate(
        {
            "name": "tiny",
            "vocab_size": vocab_size,
            "patch_size": patch_size,
            "autoencoder": stage,
            "lm": {
                "backbone": shape | (backbone or {}),
                "head": {"kind": "energy", "num_samples": 3, "num_posterior": 5} | (head or {})
                if (head or {}).get("kind", "energy") == "energy"
                else head,
                "training": {"steps": 10, "global_batch": 4, "precision": "fp32"} | (training or {}),
                "parallel": parallel or {},
                **lm,
            },
        }
    )


@pytest.fixture
def tiny() -> MakeRun:
    return make_run


@pytest.fixture(scope="session")
def make_tiny() -> MakeRun:
    return make_run
