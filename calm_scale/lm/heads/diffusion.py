"""Denoising diffusion with a cosine schedule: predict the noise, sample the reverse chain step by step."""

from __future__ import annotations

import math

import torch

from calm_scale.lm.heads.adaln import AdaLNNetwork
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.runtime.noise import PositionNoise
from calm_scale.runtime.streams import Randomness, normal

_MAX_BETA = 0.999
_MAX_LATENT = (
    6.0  # the KL term keeps latents within a few units; unclipped, early steps amplify errors 1000-fold
)


def cosine_alpha_bar(num_steps: int) -> torch.Tensor:
    """ᾱ_1 … ᾱ_T of the cosine schedule, fp64 [T]: products of 1 − β_t with β_t clipped at 0.999."""
    time = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    curve = torch.cos((time + 0.008) / 1.008 * math.pi / 2).square()
    betas = (1 - curve[1:] / curve[:-1]).clamp(max=_MAX_BETA)
    return torch.cumprod(1 - betas, dim=0)


class DiffusionHead(GenerativeHead):
    """x_t = √ᾱ_t·z + √(1 − ᾱ_t)·ε, z ~ posterior; the network predicts ε.

    Args:
        num_repeats: R independent (z, t, ε) for each position in a training step.
        train_timesteps: T of the schedule. sampling_steps: ancestral steps, evenly spaced over the T.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        num_blocks: int,
        num_repeats: int = 8,
        train_timesteps: int = 1000,
        sampling_steps: int = 100,
    ) -> None:
        super().__init__(hidden_size, latent_size)
        self.num_repeats = num_repeats
        self.train_timesteps = train_timesteps
        self.sampling_steps = min(sampling_steps, train_timesteps)
        self.net = AdaLNNetwork(hidden_size, latent_size, num_blocks)
        self.net.reset_parameters(None)

    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """Xavier weights (``init_std`` is not used), zero modulations and last layer."""
        self.net.reset_parameters(generator)

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Mean over R and l of ‖ε̂(x_t, t, h) − ε‖², [B, p]."""
        repeats, size = self.num_repeats, self.latent_size
        latent = noise.normal("diffusion/posterior", repeats, size) * log_std.float().exp().unsqueeze(-2)
        latent += mean.float().unsqueeze(-2)
        epsilon = noise.normal("diffusion/epsilon", repeats, size)
        index = (noise.uniform("diffusion/time", repeats) * self.train_timesteps).long()
        alpha_bar = cosine_alpha_bar(self.train_timesteps).to(latent)[index][..., None]
        x = alpha_bar.sqrt() * latent + (1 - alpha_bar).sqrt() * epsilon
        guess: torch.Tensor = self.net(x, index / self.train_timesteps, self.net.condition(hidden))
        return (guess.float() - epsilon).square().mean((-1, -2))

    def sample(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """hidden [..., d] → [num_samples, ..., l], by the respaced ancestral chain with its posterior variance."""
        shape = (*hidden.shape[:-1], num_samples, self.latent_size)
        x = normal(shape, generator).to(hidden.device)
        condition = self.net.condition(hidden)
        alpha_bars = cosine_alpha_bar(self.train_timesteps)
        indices = torch.linspace(0, self.train_timesteps - 1, self.sampling_steps).round().long().tolist()
        for position in range(len(indices) - 1, -1, -1):
            now = float(alpha_bars[indices[position]])
            before = float(alpha_bars[indices[position - 1]]) if position else 1.0
            time = torch.full(shape[:-1], indices[position] / self.train_timesteps, device=x.device)
            epsilon = self.net(x, time, condition)
            latent = ((x - math.sqrt(1 - now) * epsilon) / math.sqrt(now)).clamp(-_MAX_LATENT, _MAX_LATENT)
            x = _posterior_mean(latent, x, now, before)
            if position:
                spread = math.sqrt((1 - before) / (1 - now) * (1 - now / before))
                x = x + spread * normal(shape, generator).to(x.device)
        latents: torch.Tensor = x.movedim(-2, 0)
        return latents


def _posterior_mean(latent: torch.Tensor, x: torch.Tensor, now: float, before: float) -> torch.Tensor:
    """E[x_before | x_now, z] = (√ᾱ_before·β·z + √α·(1 − ᾱ_before)·x) / (1 − ᾱ_now), α = ᾱ_now/ᾱ_before."""
    alpha = now / before
    of_latent = math.sqrt(before) * (1 - alpha) / (1 - now)
    of_x = math.sqrt(alpha) * (1 - before) / (1 - now)
    return of_latent * latent + of_x * x
