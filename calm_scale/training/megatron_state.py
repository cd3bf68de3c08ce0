"""The language model's training state in a checkpoint that any layout can read.

Every tensor is stored by key in its global shape: ``model.<key>``, ``optimizer.exp_avg.<key>``,
``optimizer.exp_avg_sq.<key>`` and, for a bf16 model, ``optimizer.master.<key>`` (the fp32 weight). The number of
optimizer steps is one plain value. With the distributed optimizer each data-parallel rank holds a slice of the
moments; for saving, the slices of a weight are brought together on one rank, another one for each weight, so no
rank ever holds more than its share of the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calm_scale.config import CalmScaleError
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import Piece, pieces_of
from calm_scale.lm.sharded import model_shard, read_shards, write_shards
from calm_scale.runtime.megatron import Layout
from calm_scale.training.megatron_moments import Moments
from calm_scale.training.megatron_optimizer import MegatronOptimizer

FORMAT = 1


class UnknownFormatError(CalmScaleError):
    """The checkpoint was written by a newer or foreign version."""


def save_training_state(
    models: Sequence[CalmModel], optimizer: MegatronOptimizer, steps: int, layout: Layout, directory: Path
) -> None:
    """Write weights, moments and master weights. Every rank calls it."""
    write_shards(snapshot(models, optimizer, layout), plain_values(steps), directory)


def plain_values(steps: int) -> dict[str, int]:
    """What a checkpoint holds besides tensors."""
    return {"format": FORMAT, "optimizer_steps": steps}


def snapshot(models: Sequence[CalmModel], optimizer: MegatronOptimizer, layout: Layout) -> list[Any]:
    """This rank's part of the state as ``ShardedTensor``s. Collective over the data-parallel group.

    Where it can, the live tensors: copy or write them before the next update.
    """
    moments = Moments.of(optimizer.inner)
    shards: list[Any] = []
    for owner, parameter, pieces in _by_parameter(models, layout):
        is_main = owner == layout.data_rank
        shards += [model_shard(piece, is_main=is_main) for piece in pieces]
        whole = moments.collect(parameter, owner, layout)
        if is_main:
            shards += _optimizer_shards(pieces, moments.names, whole)
    return shards


def load_training_state(
    models: Sequence[CalmModel], optimizer: MegatronOptimizer, layout: Layout, directory: Path
) -> int:
    """Read weights and optimizer state in place; returns the number of optimizer steps. Every rank calls it."""
    moments = Moments.of(optimizer.inner)
    shards: list[Any] = []
    received: list[tuple[int, torch.nn.Parameter, torch.Tensor]] = []
    for owner, parameter, pieces in _by_parameter(models, layout):
        is_main = owner == layout.data_rank
        shards += [model_shard(piece, is_main=is_main) for piece in pieces]
        whole = torch.zeros(len(moments.names), parameter.numel() if is_main else 0)
        received.append((owner, parameter, whole))
        if is_main:
            shards += _optimizer_shards(pieces, moments.names, whole)
    values = read_shards(shards, directory)
    if values.get("format") != FORMAT:
        raise UnknownFormatError(
            f"{directory} has state format {values.get('format')}, this version reads {FORMAT}"
        )
    steps = int(values["optimizer_steps"])
    for owner, parameter, whole in received:
        moments.spread(parameter, whole, owner, layout)
    moments.finish(steps)
    return steps


def _by_parameter(
    models: Sequence[CalmModel], layout: Layout
) -> list[tuple[int, torch.nn.Parameter, list[Piece]]]:
    """(data-parallel rank that writes it, parameter, its pieces), in the same order on all replicas."""
    grouped: dict[int, tuple[torch.nn.Parameter, list[Piece]]] = {}
    for piece in pieces_of(models):
        grouped.setdefault(id(piece.parameter), (piece.parameter, []))[1].append(piece)
    return [(index % layout.data_size, p, pieces) for index, (p, pieces) in enumerate(grouped.values())]


def _optimizer_shards(
    pieces: Sequence[Piece], names: Sequence[str], whole: Sequence[torch.Tensor] | torch.Tensor
) -> list[Any]:
    return [
        piece.shard(f"optimizer.{name}.{piece.key}", tensor, is_main=True)
        for name, tensor in zip(names, whole, strict=True)
        for piece in pieces
    ]
