"""Every weight in checkpoint coordinates: the common ground of initialisation, saving, loading and comparing.

A *piece* is a run of rows of one local parameter together with its place in the global, layout-independent
tensor that a checkpoint knows by key. Most parameters are one piece; a gated projection is two (its gate and its
up half, which tensor parallelism cuts separately); a vocabulary table drops its padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from calm_scale.lm.model import CalmModel


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of ``parameter`` are the part at ``offset`` of the global tensor ``key``."""

    parameter: nn.Parameter
    start: int
    stop: int
    key: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    template: Any

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece's rows of a tensor shaped like the local parameter."""
        return tensor.view(self.parameter.shape)[self.start : self.stop]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This piece of the global tensor."""
        window = tuple(
            slice(begin, begin + size)
            for begin, size in zip(self.offset, self.template.local_shape, strict=True)
        )
        return whole[window]

    def shard(self, key: str, tensor: torch.Tensor, *, is_main: bool) -> Any:
        """A Megatron ``ShardedTensor`` of a tensor shaped like the local parameter.

        ``is_main``: among the data-parallel replicas this rank is the one that writes it.
        """
        data = self.of(tensor.detach())
        replica = (*self.template.replica_id[:2], 0 if is_main else 1)
        return replace(
            self.template,
            key=key,
            data=data,
            dtype=data.dtype,
            replica_id=replica,
            allow_shape_mismatch=False,
        )


def pieces_of(models: Sequence[CalmModel]) -> list[Piece]:
    """All pieces of this rank's stages, in a fixed order.

    Raises:
        RuntimeError: a parameter has no place in the checkpoint.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    pieces: list[Piece] = []
    for model in models:
        described = model.sharded_state_dict()
        for name, parameter in model.named_parameters():
            entry = described.get(name)
            if isinstance(entry, ShardedTensorFactory):
                pieces += _rows(parameter, entry.build())
            elif isinstance(entry, ShardedTensor):
                pieces += _rows(parameter, [entry])
            elif parameter.numel() and entry is None and not _is_all_padding(name):
                raise RuntimeError(f"parameter {name} is not described by sharded_state_dict")
    return pieces


def mark_tensor_parallel(models: Sequence[CalmModel]) -> None:
    """Tell Megatron which weights are parts of a larger tensor: the others are counted once in the global norm.

    Megatron sets this mark only where it initialises the weights itself, which it does not do here.
    """
    for piece in pieces_of(models):
        if tuple(piece.template.local_shape) != piece.global_shape:
            piece.parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _rows(parameter: nn.Parameter, shards: Sequence[Any]) -> list[Piece]:
    pieces, start = [], 0
    for shard in shards:
        stop = start + shard.local_shape[0]
        pieces.append(
            Piece(
                parameter,
                start,
                stop,
                shard.key,
                tuple(shard.global_offset),
                tuple(shard.global_shape),
                shard.without_data(),
            )
        )
        start = stop
    return pieces


def _is_all_padding(name: str) -> bool:
    return name.endswith(("table.weight", "head.linear.weight"))
