"""Initial weights that depend on the seed alone, never on the layout.

Each global tensor is drawn from a generator keyed by (seed, its checkpoint key); a rank keeps its part. Linear
layers and embeddings are N(0, init_std²), biases zero, norms one. Heads initialise themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import Piece, pieces_of
from calm_scale.runtime.noise import stream_seed


@torch.no_grad()
def initialize_weights(models: Sequence[CalmModel], seed: int, init_std: float) -> None:
    """Fill compressor, backbone and (autoregressive) output layer of these stages."""
    for model in models:
        for parameter in model.parameters():
            if getattr(parameter, "self_initialized", False):
                continue
            parameter.zero_()
    for piece in pieces_of(models):
        if not getattr(piece.parameter, "self_initialized", False):
            _fill(piece, seed, init_std)


def _fill(piece: Piece, seed: int, init_std: float) -> None:
    target = piece.of(piece.parameter)
    if target.dim() == 1:
        target.fill_(1.0 if piece.key.endswith("norm.weight") else 0.0)
        return
    generator = torch.Generator().manual_seed(stream_seed(seed, "weights", piece.key))
    whole = torch.empty(piece.global_shape).normal_(0.0, init_std, generator=generator)
    target.copy_(piece.cut(whole))
