"""Which AdamW the autoencoder is trained with: torch's fused one, or DeepSpeed's CPU Adam where it builds."""

from __future__ import annotations

import logging
from typing import Any

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.errors import ConfigError
from calm_scale.config.training import OptimizerConfig
from calm_scale.training.guarded_adamw import GuardedAdamW


def build_optimizer(
    stage: AutoencoderStage, model: Autoencoder, device: torch.device
) -> tuple[torch.optim.Optimizer, bool]:
    """AdamW with no weight decay on one-dimensional parameters; and whether it counts steps in an integer.

    Raises:
        ConfigError: CPU Adam is asked for by name and cannot be had. ``auto`` takes torch's AdamW instead.
    """
    config: OptimizerConfig = stage.training.optimizer
    parameters = [p for _, p in model.unique_parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if stage.zero.stage == 0:
        return GuardedAdamW(groups, **settings, fused=True, clip_norm=config.clip_norm), False
    if _takes_cpu_adam(stage, device):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **settings, adamw_mode=True), True
    return torch.optim.AdamW(groups, **settings, fused=True), False


def _takes_cpu_adam(stage: AutoencoderStage, device: torch.device) -> bool:
    wanted, offload = stage.zero.optimizer, stage.zero.offload
    if wanted == "cpu_adam":
        if device.type == "cuda" and offload != "cpu":
            raise ConfigError(
                "autoencoder.zero.optimizer cpu_adam updates weights in host memory: set autoencoder.zero.offload=cpu"
            )
        if (why := _why_cpu_adam_fails()) is not None:
            raise ConfigError(
                f"autoencoder.zero.optimizer cpu_adam: DeepSpeed's CPU Adam does not build here ({why}). "
                "It needs g++ and ninja; or set autoencoder.zero.optimizer=torch, which computes the same"
            )
        return True
    if wanted != "auto" or offload != "cpu" or device.type != "cuda":
        return False
    if (why := _why_cpu_adam_fails()) is not None:
        logging.getLogger(__name__).warning(
            "DeepSpeed's CPU Adam does not build here (%s): using torch's AdamW, which computes the same", why
        )
        return False
    return True


def _why_cpu_adam_fails() -> str | None:
    """None where it is built or can be built (minutes, once a machine); else the first line of what went wrong."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever the compiler says, there is an equivalent optimizer that needs none
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None
