"""The language model's training state in a checkpoint that any layout can read.

Every tensor is stored by key in its global shape: ``model.<key>``, ``optimizer.exp_avg.<key>``,
``optimizer.exp_avg_sq.<key>`` and, for a bf16 model, ``optimizer.master.<key>`` (the fp32 weight). The number of
optimizer steps is one plain value. With the distributed optimizer each data-parallel rank holds a slice of the
moments; for saving, the slices of a weight are brought together on one rank, another one for each weight, so no
rank ever holds more than its share of the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from calm_scale.config import CalmScaleError
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import Piece, pieces_of
from calm_scale.lm.sharded import model_shard, read_shards
from calm_scale.runtime.megatron import Layout
from calm_scale.training.engine import no_steps, set_step_count
from calm_scale.training.megatron.optimizer import MegatronOptimizer

FORMAT = 1


class UnknownFormatError(CalmScaleError):
    """The checkpoint was written by a newer or foreign version."""


def plain_values(steps: int) -> dict[str, int]:
    """What a checkpoint holds besides tensors."""
    return {"format": FORMAT, "optimizer_steps": steps}


def snapshot(
    models: Sequence[CalmModel],
    optimizer: MegatronOptimizer,
    layout: Layout,
    copy: Callable[[Any], Any] = lambda shard: shard,
) -> list[Any]:
    """What this rank writes of the state, as ``ShardedTensor``s. Collective over the data-parallel group.

    Args:
        copy: takes each shard while its data are there. By default they are the live tensors where those are whole and
            on the CPU: write them before the next update.
    """
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    moments = Moments(optimizer.inner)
    shards: list[Any] = []
    for owner, parameter, pieces in _by_parameter(models, layout):
        whole = moments.collect(parameter, owner, layout)
        if owner == layout.data_rank:
            weights = [model_shard(piece, is_main=True) for piece in pieces]
            written = [*weights, *_optimizer_shards(pieces, moments.names, whole)]
            shards += [copy(shard) for shard in written if is_main_replica(shard.replica_id)]
    return shards


def load_training_state(
    models: Sequence[CalmModel], optimizer: MegatronOptimizer, layout: Layout, directory: Path
) -> int:
    """Read weights and optimizer state in place; returns the number of optimizer steps. Every rank calls it."""
    moments = Moments(optimizer.inner)
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
    """(data-parallel rank that writes it, parameter, its pieces), in the same order on all replicas.

    The largest parameters first, each to the rank with the least so far.
    """
    grouped: dict[int, tuple[torch.nn.Parameter, list[Piece]]] = {}
    for piece in pieces_of(models):
        grouped.setdefault(id(piece.parameter), (piece.parameter, []))[1].append(piece)
    loads, owned = [0] * layout.data_size, []
    for parameter, pieces in sorted(grouped.values(), key=lambda group: -group[0].numel()):
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        owned.append((owner, parameter, pieces))
    return owned


def _optimizer_shards(
    pieces: Sequence[Piece], names: Sequence[str], whole: Sequence[torch.Tensor] | torch.Tensor
) -> list[Any]:
    return [
        piece.shard(f"optimizer.{name}.{piece.key}", tensor, is_main=True)
        for name, tensor in zip(names, whole, strict=True)
        for piece in pieces
    ]


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Slot:
    """Where the optimizer keeps one parameter: elements [start, stop) of it, flat, belong to this rank."""

    main: torch.Tensor
    start: int
    stop: int


class Moments:
    """Reads and writes the tensors of Megatron's (single) optimizer, one parameter at a time.

    Attributes:
        names: what is kept of each parameter: the two moments and, for a low-precision model, ``master``.
    """

    def __init__(self, chained: Any) -> None:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        (self._megatron,) = chained.chained_optimizers
        self._is_sliced = isinstance(self._megatron, DistributedOptimizer)
        self._state = self._megatron.optimizer.state if self._megatron.optimizer is not None else {}
        self.names = (*MOMENTS, "master") if self._megatron.config.bf16 else MOMENTS

    @torch.no_grad()
    def collect(self, parameter: nn.Parameter, owner: int, layout: Layout) -> Sequence[torch.Tensor]:
        """All of a parameter's tensors, flat, by ``names``, on data-parallel rank ``owner``; nothing on other ranks.

        The live tensors themselves where they are whole: copy them before the next update, or write them before it.
        Collective over the data-parallel group.
        """
        slot = self._slot(parameter)
        if not self._is_sliced:
            live = owner == layout.data_rank and slot is not None
            return [tensor.reshape(-1) for tensor in self._tensors(slot)] if live and slot else []
        whole = torch.zeros(len(self.names), parameter.numel(), device=parameter.device)
        if slot is not None:
            for row, tensor in zip(whole, self._tensors(slot), strict=True):
                row[slot.start : slot.stop] = tensor.reshape(-1)
        if layout.data_size > 1:
            dist.reduce(whole, dist.get_global_rank(layout.data_group, owner), group=layout.data_group)
        return list(whole) if owner == layout.data_rank else []

    @torch.no_grad()
    def spread(self, parameter: nn.Parameter, whole: torch.Tensor, owner: int, layout: Layout) -> None:
        """Give every rank its part of what ``owner`` read."""
        if layout.data_size > 1:
            if owner == layout.data_rank:
                whole = whole.to(parameter.device)
            else:
                whole = torch.empty(len(self.names), parameter.numel(), device=parameter.device)
            dist.broadcast(whole, dist.get_global_rank(layout.data_group, owner), group=layout.data_group)
        slot = self._slot(parameter)
        if slot is None:
            return
        for row, tensor in zip(whole, self._tensors(slot), strict=True):
            tensor.copy_(row[slot.start : slot.stop].view_as(tensor))

    def finish(self, steps: int) -> None:
        """Set the number of updates that were made, wherever this optimizer keeps it."""
        if self._megatron.optimizer is not None:
            set_step_count(self._megatron.optimizer, steps)

    def _slot(self, parameter: nn.Parameter) -> _Slot | None:
        """This rank's part of a parameter; None when it holds nothing of it."""
        if not self._is_sliced:  # every data-parallel rank holds the same, complete state
            return _Slot(getattr(parameter, "main_param", parameter), 0, parameter.numel())
        index = self._megatron.model_param_group_index_map.get(parameter)
        if index is None:
            return None
        group, order = index
        main = self._megatron.optimizer.param_groups[group]["params"][order]
        held = self._megatron._get_model_param_range_map(parameter)["param"]
        return _Slot(main, held.start, held.end)

    def _tensors(self, slot: _Slot) -> list[torch.Tensor]:
        """By ``names``; zero moments, and torch's count of updates, are created where no update was made yet."""
        state = self._state[slot.main]
        if "exp_avg" not in state:
            state["step"] = no_steps(self._megatron.optimizer, slot.main)
            for name in MOMENTS:
                state[name] = torch.zeros_like(slot.main, memory_format=torch.preserve_format)
        tensors = [state[name] for name in MOMENTS]
        return [*tensors, slot.main] if "master" in self.names else tensors
