"""DeepSpeed's CPU Adam where it builds; a clear word where it does not."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from pydantic import ValidationError

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import ConfigError
from calm_scale.config.autoencoder import AutoencoderModelConfig, AutoencoderStage, ZeroConfig
from calm_scale.config.training import TrainingConfig
from calm_scale.training.deepspeed.setup import build_optimizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def fails(self: object, verbose: bool = True) -> None:
        raise RuntimeError("g++: not found\nand a long log")

    monkeypatch.setattr(CPUAdamBuilder, "load", fails)


def built(device: torch.device, **zero: object) -> tuple[torch.optim.Optimizer, bool]:
    sizes = AutoencoderModelConfig(hidden_size=8, ffn_size=8, latent_size=4)
    stage = AutoencoderStage(
        model=sizes, training=TrainingConfig(steps=1, global_batch=1), zero=ZeroConfig(**zero)
    )
    return build_optimizer(stage, Autoencoder(sizes, 11, 2), device)


def test_auto_falls_back_to_torch_and_says_so(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        optimizer, integer_step = built(CUDA, stage=2, offload="cpu")
    assert type(optimizer) is torch.optim.AdamW and not integer_step
    assert "does not build here (g++: not found): using torch's AdamW" in caplog.text


def test_asked_for_by_name_it_is_refused_with_the_way_out(no_compiler: None) -> None:
    with pytest.raises(ConfigError, match=r"\(g\+\+: not found\).*autoencoder.zero.optimizer=torch"):
        built(CPU, stage=2, optimizer="cpu_adam")


def test_it_is_refused_where_the_weights_are_not_in_host_memory() -> None:
    with pytest.raises(ConfigError, match=r"autoencoder\.zero\.offload=cpu"):
        built(CUDA, stage=2, optimizer="cpu_adam")
    with pytest.raises(ValidationError, match="cpu_adam needs ZeRO stage 1, 2 or 3"):
        ZeroConfig(stage=0, optimizer="cpu_adam")
