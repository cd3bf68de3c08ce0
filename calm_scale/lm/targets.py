"""What one micro-batch asks of the frozen autoencoder: inputs for the first stage, targets for the last."""

from __future__ import annotations

from typing import Protocol

import torch

from calm_scale.lm.model import CalmModel, Targets
from calm_scale.lm.positions import owned_positions
from calm_scale.runtime.megatron import Layout
from calm_scale.runtime.noise import Namespace, PositionNoise


class LatentCodec(Protocol):
    """The frozen autoencoder, as the language model sees it."""

    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [..., K] → posterior mean and log_std [..., l]."""

    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [..., l] → the most likely token ids [..., K]."""


@torch.no_grad()
def input_latents(model: CalmModel, codec: LatentCodec | None, tokens: torch.Tensor) -> torch.Tensor | None:
    """Posterior means [b, P, l] of tokens [b, P·K], where this stage's compressor reads latents; None elsewhere."""
    if model.compressor is None or model.compressor.latent is None:
        return None
    return _required(codec).encode(tokens.view(tokens.shape[0], -1, model.patch_size))[0]


def position_weights(tokens: torch.Tensor, patch_size: int, pad_id: int | None) -> torch.Tensor:
    """What each position of tokens [..., P·K] counts in the loss, [..., P]: 1, and 0 for the last position of a
    sequence and wherever the next patch is nothing but padding."""
    patches = tokens.unflatten(-1, (-1, patch_size))
    weights = torch.ones(patches.shape[:-1], device=tokens.device)
    if pad_id is not None:
        weights = (patches != pad_id).any(-1).roll(-1, dims=-1).float()
    weights[..., -1] = 0.0
    return weights


@torch.no_grad()
def next_patch_targets(
    model: CalmModel,
    codec: LatentCodec | None,
    layout: Layout,
    tokens: torch.Tensor,
    sample_ids: torch.Tensor,
    *,
    seed: int,
    step: int,
    namespace: Namespace,
    pad_id: int | None = None,
) -> tuple[Targets, torch.Tensor]:
    """Targets of this rank's positions and their weights [b, p]; see ``position_weights``.

    Position i predicts patch i+1, so the patches are rolled by one; what the last position is then compared
    with is meaningless and weighs nothing. It is kept because P, unlike P − 1, divides over the ranks.
    """
    patches = tokens.view(tokens.shape[0], -1, model.patch_size).roll(-1, dims=1)
    num_positions = patches.shape[1]
    weights = position_weights(tokens, model.patch_size, pad_id)
    if model.is_autoregressive:
        return Targets(ids=patches.squeeze(-1)), weights
    owned = range(num_positions)
    if model.splits_positions:
        owned = owned_positions(num_positions, layout.tensor_rank, layout.tensor_size)
    mean, log_std = _required(codec).encode(patches[:, owned.start : owned.stop])
    noise = PositionNoise(seed, step, sample_ids, owned, namespace=namespace, device=tokens.device)
    return Targets(mean.float(), log_std.float(), noise), weights[:, owned.start : owned.stop]


def _required(codec: LatentCodec | None) -> LatentCodec:
    if codec is None:
        raise ValueError("this language model needs a frozen autoencoder, none was given")
    return codec
