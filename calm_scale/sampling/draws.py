"""Draws from a model in pieces, so that the logits alive at once are bounded whatever N, the batch and V are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calm_scale.runtime.streams import Randomness, of_rows

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import PatchModel

_LOGITS = 1 << 28  # fp32: 1 GiB


def draw_rows(model: PatchModel, hidden: Tensor, num_samples: int, generator: Randomness) -> Tensor:
    """Ids ``[num_samples, R, K]`` for hidden ``[R, d]``.

    The pieces follow from the arguments alone, so a seed means the same ids; a piece is some rows with all their
    samples, or, where one row's samples are too many, a part of those.
    """
    per_sample = model.patch_size * model.vocab_size
    rows_at_once = max(1, _LOGITS // (num_samples * per_sample))
    samples_at_once = max(1, min(num_samples, _LOGITS // per_sample))
    pieces = []
    for begin in range(0, len(hidden), rows_at_once):
        rows = hidden[begin : begin + rows_at_once]
        source = of_rows(generator, range(begin, begin + len(rows)))
        counts = [min(samples_at_once, num_samples - i) for i in range(0, num_samples, samples_at_once)]
        pieces.append(torch.cat([model.draw(rows, count, source) for count in counts]))
    return torch.cat(pieces, dim=1)
