"""The law of a model that states it, at a temperature: merged by decoded patch, then raised to 1/T. Exact, no draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calm_scale.runtime.noise import Randomness, categorical, of_rows

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import StatedLaw

_COMPARED = 1 << 24  # token pairs compared at once


def tempered_law(ids: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """P^{1/T}/Z over the C listed patches, fp64 [R, C]: on the first of equal patches, 0 on the others.

    Args:
        ids: [R, C, K] decoded patches, of which some may be equal. weights: [R, C], their probabilities.
    """
    equal = (ids[:, :, None] == ids[:, None]).all(-1)
    law = torch.matmul(equal.double(), weights.double()[..., None])[..., 0]
    first = equal.int().argmax(-1) == torch.arange(ids.shape[1], device=ids.device)
    return torch.softmax(law.log().masked_fill(~first, -torch.inf) / temperature, dim=-1)


def sample_law(
    model: StatedLaw, hidden: Tensor, num_samples: int, temperature: float, generator: Randomness
) -> Tensor:
    """Ids [num_samples, R, K] of independent draws from P^{1/T}/Z for hidden [R, d]."""
    pieces = []
    for begin in range(0, len(hidden), _rows_at_once(model)):
        rows = hidden[begin : begin + _rows_at_once(model)]
        source = of_rows(generator, range(begin, begin + len(rows)))
        ids, weights = model.stated_law(rows)
        law = tempered_law(ids, weights, temperature)
        drawn = categorical(law.to(source.device), num_samples, source).to(ids.device)
        taken = ids.gather(1, drawn[..., None].expand(-1, -1, ids.shape[-1]))
        pieces.append(taken.transpose(0, 1))
    return torch.cat(pieces, dim=1)


def _rows_at_once(model: StatedLaw) -> int:
    return max(1, _COMPARED // (model.num_listed**2 * model.patch_size))
