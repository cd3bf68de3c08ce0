"""How DeepSpeed is set up for an autoencoder: its JSON, derived from our configuration, and which AdamW it uses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.errors import ConfigError
from calm_scale.config.training import OptimizerConfig

_MAX_BUCKET = 500_000_000


def deepspeed_config(stage: AutoencoderStage, world_size: int, num_parameters: int) -> dict[str, Any]:
    """The JSON handed to ``deepspeed.initialize``; ``zero.overrides`` are merged in last.

    Weights, gradients and their reduction are fp32 in every stage; bf16 is autocast inside the model, so one
    numerical recipe holds for ZeRO 0 to 3. Communication buckets are no larger than the model, because DeepSpeed
    allocates them in full. At stage 0 clipping is done by our optimizer (see ``GuardedAdamW``).
    """
    training, zero = stage.training, stage.zero
    bucket = min(_MAX_BUCKET, num_parameters + num_parameters % 2)  # DeepSpeed's buckets begin at even places
    optimization: dict[str, Any] = {
        "stage": zero.stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if zero.stage == 3:
        optimization["stage3_prefetch_bucket_size"] = bucket
    if zero.offload == "cpu":
        optimization["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation(world_size),
        "gradient_clipping": 0.0 if zero.stage == 0 else training.optimizer.clip_norm,
        "zero_optimization": optimization,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    return _merge(config, zero.overrides)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        inner = out.get(key)
        out[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return out


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


class GuardedAdamW(torch.optim.AdamW):
    """Clips by the global norm and leaves everything unchanged when that norm is not finite.

    ``_global_grad_norm`` and ``overflow`` are what DeepSpeed reads off an optimizer after ``step``. Gradients
    are already averaged over ranks here, so every rank computes the same norm and takes the same branch.
    """

    def __init__(self, *args: Any, clip_norm: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clip_norm = clip_norm
        self._global_grad_norm = 0.0
        self.overflow = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update, or none at all."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self._clip_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        super().step(closure)
