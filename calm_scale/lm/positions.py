"""Which positions this rank computes in the head, and how hidden states and gradients get there and back.

The head, its loss and the frozen encoder work on one position at a time. With ``head_parallelism: position`` each
tensor-parallel rank takes a contiguous slice of the positions and holds all the weights, so that nothing is
communicated inside the head. The weights' gradients are then partial sums: they are marked
``position_parallel`` and added up over the group once per step, see ``sum_position_parallel_gradients``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def owned_positions(num_positions: int, rank: int, size: int) -> range:
    """The slice of positions of one rank; ``size`` divides ``num_positions``."""
    share = num_positions // size
    return range(rank * share, (rank + 1) * share)


def take_owned(hidden: torch.Tensor) -> torch.Tensor:
    """[P, b, d] replicated over the tensor-parallel group → this rank's [P/TP, b, d].

    The backward pass gathers the slices, so that the layers below see the gradient of all positions.
    """
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

    owned: torch.Tensor = scatter_to_sequence_parallel_region(hidden)
    return owned


def gather_all(hidden: torch.Tensor) -> torch.Tensor:
    """This rank's [P/TP, b, d] → [P, b, d] everywhere; the backward pass keeps this rank's slice of the gradient."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return whole


def mark_position_parallel(module: nn.Module) -> None:
    """These weights see only this rank's positions; their gradients must be summed over the group."""
    for parameter in module.parameters():
        parameter.position_parallel = True  # type: ignore[attr-defined]


def sum_position_parallel_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the partial gradients of every marked weight over the tensor-parallel group, in one collective."""
    if dist.get_world_size(group) == 1:
        return
    gradients = [p.main_grad for p in parameters if getattr(p, "position_parallel", False)]  # type: ignore[attr-defined]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
