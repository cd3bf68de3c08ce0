"""Linear layers of a head divided over tensor-parallel ranks, and the sums between them."""

from __future__ import annotations

import torch
from torch import nn


def split_rows(linear: nn.Linear, rank: int, size: int, parts: int = 1) -> nn.Linear:
    """This rank's output rows, of each of ``parts`` stacked matrices."""
    own = [block.chunk(size)[rank] for block in linear.weight.detach().chunk(parts)]
    bias = [block.chunk(size)[rank] for block in linear.bias.detach().chunk(parts)]
    return _make_linear(torch.cat(own), torch.cat(bias))


def split_columns(linear: nn.Linear, rank: int, size: int) -> nn.Linear:
    """This rank's input columns; the bias is kept whole and added once."""
    return _make_linear(linear.weight.detach().chunk(size, dim=1)[rank], linear.bias.detach())


def enter(x: torch.Tensor) -> torch.Tensor:
    """Identity; the backward pass sums the gradient over the group."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    entered: torch.Tensor = copy_to_tensor_model_parallel_region(x)
    return entered


def leave(x: torch.Tensor) -> torch.Tensor:
    """Sum over the group; the backward pass is the identity."""
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    left: torch.Tensor = reduce_from_tensor_model_parallel_region(x)
    return left


def _make_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight.clone())
    made.bias = nn.Parameter(bias.clone())
    return made
