"""``head_parallelism: tensor``: the energy head's blocks with their weights split over tensor-parallel ranks.

Each block is two column-then-row pairs, so it costs two all-reduces forward and as many backward for every
position and sample; every rank computes all positions and the whole loss. Position parallelism needs none of
that: this form is for heads too wide for one device, and for measuring the difference.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from calm_scale.lm.heads.energy import EnergyBlock, EnergyHead


def split_energy_head(head: EnergyHead, rank: int, size: int) -> EnergyHead:
    """Replace each residual block by this rank's part of it. The rest of the head stays replicated."""
    head.mlp_blocks = nn.ModuleList(
        SplitEnergyBlock(cast(EnergyBlock, block), rank, size) for block in head.mlp_blocks
    )
    return head


class SplitEnergyBlock(nn.Module):
    """One rank's part of an ``EnergyBlock``: the same function, parameter names and checkpoint keys.

    Split by output rows: ``linears.0`` and ``linears.4`` (gate and up rows alike). By input columns:
    ``linears.2`` and ``down_proj``, whose partial results are summed over the group before the bias.
    """

    def __init__(self, block: EnergyBlock, rank: int, size: int) -> None:
        super().__init__()
        entry, middle, gates = (cast(nn.Linear, block.linears[i]) for i in (0, 2, 4))
        self.in_ln = block.in_ln
        self.linears = nn.ModuleDict(
            {
                "0": _rows(entry, rank, size),
                "2": _columns(middle, rank, size),
                "4": _rows(gates, rank, size, parts=2),
            }
        )
        self.down_proj = _columns(block.down_proj, rank, size)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """x [..., N, d], hidden [..., d] → [..., N, d], all replicated over the group."""
        entry, middle, gates = (cast(nn.Linear, self.linears[key]) for key in ("0", "2", "4"))
        width = x.shape[-1]
        of_hidden = F.linear(_enter(hidden), entry.weight[:, width:], entry.bias)
        y = F.linear(_enter(self.in_ln(x)), entry.weight[:, :width]) + of_hidden.unsqueeze(-2)
        y = _leave(F.linear(F.silu(y), middle.weight)) + middle.bias
        gate, up = gates(_enter(F.silu(y))).chunk(2, dim=-1)
        return x + _leave(F.linear(F.silu(gate) * up, self.down_proj.weight)) + self.down_proj.bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Which axis of which weight is split."""
        from megatron.core import parallel_state
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        axes = {"linears.0.weight": 0, "linears.0.bias": 0, "linears.2.weight": 1, "down_proj.weight": 1}
        gated = {"linears.4.weight": 0, "linears.4.bias": 0}
        described = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes | gated,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        for name in gated:
            described[prefix + name] = apply_swiglu_sharded_factory(described[prefix + name], sharded_offsets)
        return dict(described)


def _rows(linear: nn.Linear, rank: int, size: int, parts: int = 1) -> nn.Linear:
    """This rank's output rows, of each of ``parts`` stacked matrices."""
    own = [block.chunk(size)[rank] for block in linear.weight.detach().chunk(parts)]
    bias = [block.chunk(size)[rank] for block in linear.bias.detach().chunk(parts)]
    return _linear(torch.cat(own), torch.cat(bias))


def _columns(linear: nn.Linear, rank: int, size: int) -> nn.Linear:
    """This rank's input columns; the bias is kept whole and added once."""
    return _linear(linear.weight.detach().chunk(size, dim=1)[rank], linear.bias.detach())


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight.clone())
    made.bias = nn.Parameter(bias.clone())
    return made


def _enter(x: torch.Tensor) -> torch.Tensor:
    """Identity; the backward pass sums the gradient over the group."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    entered: torch.Tensor = copy_to_tensor_model_parallel_region(x)
    return entered


def _leave(x: torch.Tensor) -> torch.Tensor:
    """Sum over the group; the backward pass is the identity."""
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    left: torch.Tensor = reduce_from_tensor_model_parallel_region(x)
    return left
