"""Bytes a forward pass keeps for its backward pass, per position of one micro-batch and rank.

``fused`` is the CUDA path (norms keep their input, SwiGLU keeps one tensor); ``local`` the CPU path, where plain
operations keep more. Attention keeps q, k, v, its output and one number a head: scores are never stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calm_scale.config.lm import LMStage
from calm_scale.config.run import RunConfig

Kernels = Literal["fused", "local"]
FP32 = 4


@dataclass(frozen=True)
class Saved:
    """Bytes per position (of the P · b of a micro-batch): what is kept, and the largest passing extra."""

    kept: float
    passing: float = 0.0


def element(lm: LMStage) -> int:
    """Bytes of one activation or weight in the training precision."""
    return 2 if lm.training.precision == "bf16" else FP32


def layer(config: RunConfig, kernels: Kernels) -> Saved:
    """One Transformer layer under the run's recomputation mode."""
    lm = config.require_lm()
    backbone, tensor, w = lm.backbone, lm.parallel.tensor, element(lm)
    d, kv = backbone.hidden_size, backbone.query_groups * backbone.head_dim
    sequence = tensor if lm.parallel.sequence_parallel else 1
    norms = 2 * (norm(config, kernels) + w * d / sequence)
    attention = w * (d + 2 * kv) + w * (d + kv) + w * d + FP32 * backbone.num_heads
    feedforward = (3 if kernels == "fused" else 5) * w * backbone.ffn_size
    whole = norms + (attention + feedforward) / tensor
    if lm.parallel.recompute == "full":
        return Saved(w * d / sequence, whole)
    if lm.parallel.recompute == "selective":
        again = FP32 * backbone.num_heads / tensor
        return Saved(whole - again, again)
    return Saved(whole)


def norm(config: RunConfig, kernels: Kernels) -> float:
    """One RMSNorm: its input and one number; on the CPU path input and normalised input in fp32."""
    lm = config.require_lm()
    d = lm.backbone.hidden_size
    sequence = lm.parallel.tensor if lm.parallel.sequence_parallel else 1
    return ((element(lm) * d if kernels == "fused" else 2 * FP32 * d) + FP32) / sequence


def input_side(config: RunConfig) -> Saved:
    """Embeddings of the K tokens and the two-layer compressor."""
    lm = config.require_lm()
    d, w, tensor = lm.backbone.hidden_size, element(lm), lm.parallel.tensor
    sequence = tensor if lm.parallel.sequence_parallel else 1
    ids = 8 * config.patch_size
    if lm.predicts_tokens:
        return Saved(ids)
    tokens = w * config.patch_size * d / sequence + 2 * w * 2 * d / tensor
    latent = w * config.latent_size
    kept = {"discrete": tokens, "continuous": latent, "both": tokens + latent}[lm.input_mode]
    return Saved(ids + kept + (w * d + 2 * w) / sequence)


def output_side(config: RunConfig, kernels: Kernels, positions: int) -> Saved:
    """Final norm, and what the head and its loss keep for the positions that this rank owns.

    ``positions``: P · b of the micro-batch, which may bound the workspace of a loss.
    """
    lm = config.require_lm()
    owns_slice = lm.parallel.head_parallelism == "position" and not lm.predicts_tokens
    share = lm.parallel.tensor if owns_slice else 1
    head = lm.head.kept_bytes(config, positions // share)
    return Saved(norm(config, kernels) + head.kept / share, head.passing / share)


def in_flight(config: RunConfig, stage: int, num_micro_batches: int) -> list[int]:
    """Micro-batches whose activations stage ``stage`` holds at once, for each of its chunks.

    1F1B: p − s of them. Interleaved: 2(p − s − 1) + (v − 1)·p + 1 passes, p micro-batches through each chunk in turn.
    """
    parallel = config.require_lm().parallel
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    if virtual == 1:
        return [min(num_micro_batches, pipeline - stage)]
    warm_up = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline
    passes = min(num_micro_batches * virtual, warm_up + 1)
    chunks = [index // pipeline % virtual for index in range(passes)]
    return [chunks.count(chunk) for chunk in range(virtual)]
