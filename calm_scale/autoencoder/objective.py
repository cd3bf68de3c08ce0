"""The training objective (paper Eqs. 2–6): K · CE + β · mean over patches of Σ_j max(λ, KL_j).

Everything is returned as *sums* with weights given from outside, so that a loss can be the mean over the valid
tokens and patches of the global batch, however the batch is split over ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config.autoencoder import ObjectiveConfig
from calm_scale.runtime.noise import PositionNoise


@dataclass(frozen=True)
class PatchNoise:
    """The random numbers of a micro-batch of B·P patches; None where the objective does not use them.

    ``posterior`` N(0, 1) [B, P, l] · ``dropped_tokens`` bool [B, P, K] · ``kept_latents`` bool [B, P, l].
    """

    posterior: torch.Tensor | None
    dropped_tokens: torch.Tensor | None
    kept_latents: torch.Tensor | None


def draw_noise(
    config: ObjectiveConfig, patch_size: int, latent_size: int, source: PositionNoise
) -> PatchNoise:
    """Draw what training needs from noise keyed by (seed, step, sample id, position)."""
    posterior = dropped = kept = None
    if config.posterior == "gaussian":
        posterior = source.normal("posterior", latent_size)
    if config.token_dropout > 0:
        dropped = source.uniform("token_dropout", patch_size) < config.token_dropout
    if config.latent_dropout > 0:
        kept = source.uniform("latent_dropout", latent_size) >= config.latent_dropout
    return PatchNoise(posterior, dropped, kept)


def gaussian_kl(mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """KL_j(N(μ_j, σ_j²) ‖ N(0, 1)) = ½(μ_j² + σ_j² − 1 − log σ_j²), elementwise, nats."""
    return 0.5 * (mean.square() + torch.exp(2 * log_std) - 1) - log_std


def clipped_kl(mean: torch.Tensor, log_std: torch.Tensor, floor: float) -> torch.Tensor:
    """Σ_j max(λ, KL_j) of every patch: [..., l] → [...]. A dimension below λ contributes λ and no gradient."""
    kl = gaussian_kl(mean, log_std)
    return (kl.clamp(min=floor) if floor > 0 else kl).sum(dim=-1)


SUMS = ("cross_entropy", "clipped_kl", "correct_tokens", "std")
"""What the second output of ``TrainingObjective`` adds up, in this order."""


class TrainingObjective(nn.Module):
    """The autoencoder wrapped with its loss: the module that a data-parallel engine trains.

    Token dropout replaces an input token (labels stay clean) by id 0 or by a zero embedding; latent dropout
    zeroes elements of z and scales the others by 1/(1 − p). Both exist here only: encode and decode never drop.

    Args:
        autoencoder: the model.
        config: the objective's settings; every row of the paper's Table 2 is one.
        autocast: dtype of the matrix products (None: the parameters' own). Weights, sums and losses stay fp32.
    """

    def __init__(
        self, autoencoder: Autoencoder, config: ObjectiveConfig, *, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.config = config
        self.autocast = autocast

    def forward(
        self,
        tokens: torch.Tensor,
        valid: torch.Tensor,
        noise: PatchNoise,
        token_weight: float,
        patch_weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss of a micro-batch: K · token_weight · Σ CE + β · patch_weight · Σ Σ_j max(λ, KL_j).

        ``tokens`` int64 [B, P, K]; ``valid`` bool [B, P, K]: tokens that count (a patch counts if any of its
        tokens does). With weights 1/#tokens and 1/#patches of the global batch, the losses of all
        micro-batches add up to the objective.

        Returns:
            The scalar loss, and the detached float64 [4] sums over valid tokens and patches named by ``SUMS``.
        """
        config = self.config
        with torch.autocast(tokens.device.type, self.autocast, enabled=self.autocast is not None):
            mean, log_std = self._encode(tokens, noise.dropped_tokens)
            std = log_std.exp()
            latents = mean if noise.posterior is None else mean + std * noise.posterior
            if noise.kept_latents is not None:
                latents = latents * noise.kept_latents / (1 - config.latent_dropout)
            ce_sum, correct = self.autoencoder.reconstruction(latents, tokens, valid)
        patches = valid.any(dim=-1)
        kl_sum = (clipped_kl(mean, log_std, config.kl_floor) * patches).sum()
        loss = self.autoencoder.patch_size * token_weight * ce_sum
        if config.kl_weight > 0:
            loss = loss + config.kl_weight * patch_weight * kl_sum
        with torch.no_grad():
            std_sum = (std.mean(dim=-1) * patches).sum()
            sums = torch.stack([value.double() for value in (ce_sum, kl_sum, correct, std_sum)])
        return loss, sums

    def _encode(
        self, tokens: torch.Tensor, dropped: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        encoder = self.autoencoder.encoder
        if dropped is None:
            out: tuple[torch.Tensor, torch.Tensor] = encoder(tokens)
        elif self.config.masked_token == "id_zero":
            out = encoder(tokens.masked_fill(dropped, 0))
        else:
            out = encoder(tokens, dropped)
        return out


def objective_value(
    config: ObjectiveConfig, patch_size: int, cross_entropy: float, clipped_kl_mean: float
) -> float:
    """K · mean CE + β · mean clipped KL."""
    return patch_size * cross_entropy + config.kl_weight * clipped_kl_mean
