"""Into which layouts a checkpoint can resume, and what stays bitwise. From the card alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calm_scale.checkpoint.card import Card
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.lm import LMStage

LIMIT = 64
"""Largest tensor- and pipeline-parallel size that is listed."""


@dataclass(frozen=True)
class ResumeTargets:
    """What a checkpoint can become.

    Attributes:
        written_by: the layout that wrote it; resuming there repeats the unbroken run bit for bit.
        tensor, pipeline: sizes the model's shape allows (language model).
        data: data-parallel sizes with which the global batch stays the same.
        zero_stages: ZeRO stages (autoencoder).
        notes: what holds in every other layout.
    """

    written_by: dict[str, Any]
    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    zero_stages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def resume_targets(card: Card) -> ResumeTargets:
    """Raises UnknownRunError when the card's configuration is not one of this version."""
    common = (
        "the same sequences in the same order, learning rate, step count and noise in every layout",
        "in another layout sums are formed in another order: losses agree to about 1e-5, not bit for bit",
    )
    if card.stage == "autoencoder":
        stage = card.described(AutoencoderStage, card.stage)
        return ResumeTargets(
            written_by=card.topology,
            data=_data_sizes(stage.training.global_batch, stage.training.micro_batch),
            zero_stages=(0, 1, 2, 3),
            notes=common,
        )
    lm = card.described(LMStage, card.stage)
    shape = (lm.backbone.num_heads, lm.backbone.query_groups, lm.backbone.ffn_size, lm.backbone.hidden_size)
    return ResumeTargets(
        written_by=card.topology,
        tensor=tuple(t for t in range(1, LIMIT + 1) if all(size % t == 0 for size in shape)),
        pipeline=tuple(range(1, min(LIMIT, lm.backbone.num_layers) + 1)),
        data=_data_sizes(lm.training.global_batch, lm.training.micro_batch),
        notes=(
            *common,
            "with and without the distributed optimizer, sequence parallelism, recompute and virtual stages",
        ),
    )


def _data_sizes(global_batch: int, micro_batch: int) -> tuple[int, ...]:
    micro_batches = global_batch // micro_batch
    return tuple(size for size in range(1, micro_batches + 1) if micro_batches % size == 0)
