"""The DeepSpeed configuration of an autoencoder run, derived from ours. Pure: no torch, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calm_scale.config.autoencoder import AutoencoderStage

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
