"""What the last stage scores and which positions of it this rank owns; what a micro-batch asks of the frozen encoder.

The head, its loss and the frozen encoder work on one position at a time. With ``head_parallelism: position`` each
tensor-parallel rank takes a contiguous slice of the positions and holds all the weights, so that nothing is
communicated inside the head. The weights' gradients are then partial sums: they are marked
``position_parallel`` and added up over the group once per step, see ``sum_position_parallel_gradients``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

from calm_scale.runtime.megatron import Layout
from calm_scale.runtime.noise import Namespace, PositionNoise

if TYPE_CHECKING:
    from calm_scale.lm.model import CalmModel


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


@dataclass(frozen=True)
class Targets:
    """What the last stage scores: the frozen encoder's posterior of each position's next patch, and the noise.

    ``mean`` and ``log_std`` are [b, p, l] for this rank's p positions. The autoregressive baseline has
    ``ids`` [b, P] instead.
    """

    mean: torch.Tensor | None = None
    log_std: torch.Tensor | None = None
    noise: PositionNoise | None = None
    ids: torch.Tensor | None = None


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
