"""The most likely ids through the tied embedding, by a bf16 pass that is proven against fp32.

argmax_v w_v·h over V rows is what decoding a candidate costs. Where bf16 products are several times faster than fp32
(AMX or AVX-512 bf16, tensor cores), a first pass in bf16 gives each block of rows the interval in which its largest
fp32 product lies. Only blocks whose interval reaches the best lower end can hold the argmax; their products are formed
again in fp32. With w̃, h̃ the bf16 values and u = 2⁻⁸ the unit roundoff of bf16,

    |w·h − w̃·h̃| ≤ ‖w̃‖·‖h − h̃‖ + ‖w − w̃‖·‖h‖,

and the result of the pass is rounded once more, by at most u times its size. A row of ``hidden`` whose winner leads by
no more than the rounding of fp32 products, or that has many such blocks, takes the plain product. So the ids are those
of ``F.linear(hidden, weight).argmax(-1)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK = 16
_MAX_BLOCKS = 4
"""Blocks of a row that are formed again; a row with more takes the plain product."""
_UNIT = 2.0**-8
_FP32_UNIT = 2.0**-24


def screening_pays(weight: torch.Tensor) -> bool:
    """Whether products with ``weight`` [V, a] are fp32, and bf16 is faster on its device."""
    if weight.dtype != torch.float32 or len(weight) < _BLOCK**2:
        return False
    if weight.device.type == "cuda":
        return torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return weight.device.type == "cpu" and has_fast_bf16()


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


class LikeliestIds:
    """argmax_v weight_v · hidden for an embedding [V, a] that does not change; holds it a second time, in bf16."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.num_blocks = len(weight) // _BLOCK
        """Block b holds rows b, b + num_blocks, …: maxima over such blocks are the fastest to take."""
        self.num_whole = self.num_blocks * _BLOCK
        """Rows in whole blocks; the rest are always formed in fp32."""
        self.rounded = weight[: self.num_whole].bfloat16()
        wide = self.rounded.float()
        self.rounded_norms = _block_maxima(wide.norm(dim=-1))
        self.error_norms = _block_maxima((weight[: self.num_whole] - wide).norm(dim=-1))
        self.largest_norm = weight.norm(dim=-1).max()

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, a] → int64 [n]. n · V bf16 products are held."""
        rounded = hidden.bfloat16()
        sizes = hidden.norm(dim=-1, keepdim=True)
        best = _block_maxima(rounded @ self.rounded.T).float()  # [n, V/16]
        error = (hidden - rounded.float()).norm(dim=-1, keepdim=True) * self.rounded_norms
        error += sizes * self.error_norms
        error += 2 * _UNIT * best.abs() + self._fp32_error(sizes)
        possible = best + error >= (best - error).amax(-1, keepdim=True)
        ids, proven = self._among(hidden, possible, self._fp32_error(sizes).squeeze(-1))
        open_rows = (~proven).nonzero().squeeze(-1)
        ids[open_rows] = F.linear(hidden[open_rows], self.weight).argmax(dim=-1)
        return ids

    def _among(
        self, hidden: torch.Tensor, possible: torch.Tensor, error: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fp32 argmax within the possible blocks [n, V/16], and where it is proven."""
        few = possible.sum(-1) <= _MAX_BLOCKS
        row, block = (possible & few.unsqueeze(-1)).nonzero(as_tuple=True)
        slot = torch.arange(len(row), device=row.device) - torch.searchsorted(
            row, row
        )  # nth block of its row
        members = block.unsqueeze(-1) + self.num_blocks * torch.arange(_BLOCK, device=row.device)
        products = (self.weight[members] @ hidden[row].unsqueeze(-1)).squeeze(-1)
        scores = hidden.new_full((len(hidden), _MAX_BLOCKS, _BLOCK), -torch.inf)
        scores[row, slot] = products
        scores = scores.flatten(1)
        rest = F.linear(hidden, self.weight[self.num_whole :])
        scores = torch.cat([scores, rest], dim=-1)
        places = torch.zeros(len(hidden), _MAX_BLOCKS, _BLOCK, dtype=torch.int64, device=row.device)
        places[row, slot] = members
        tail = torch.arange(self.num_whole, len(self.weight), device=row.device).expand(len(hidden), -1)
        leaders, at = scores.topk(2, dim=-1)
        ids = torch.cat([places.flatten(1), tail], dim=-1).gather(-1, at[:, :1]).squeeze(-1)
        return ids, few & (leaders[:, 0] - leaders[:, 1] > 4 * error)

    def _fp32_error(self, sizes: torch.Tensor) -> torch.Tensor:
        """What a sum of ``a`` fp32 products may be off by, whatever its order."""
        error: torch.Tensor = sizes * self.largest_norm * (self.weight.shape[-1] * 2 * _FP32_UNIT)
        return error


def _block_maxima(values: torch.Tensor) -> torch.Tensor:
    """[..., V] → [..., V/16]."""
    largest: torch.Tensor = values.unflatten(-1, (_BLOCK, -1)).amax(-2)
    return largest
