"""Flow matching and diffusion over one network: adaLN blocks conditioned on time and hidden state.

Flow matching learns the velocity from noise to the posterior and integrates it with the midpoint rule. Diffusion
predicts the noise under a cosine schedule and samples the reverse chain step by step.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from calm_scale.lm.heads.base import GenerativeHead, init_linears, linear_fp32
from calm_scale.lm.heads.denoising import TIME_FEATURES
from calm_scale.runtime.noise import PositionNoise, Randomness, normal

_NORM_EPS = 1e-6
_MAX_BETA = 0.999
# The KL term keeps latents within a few units; unclipped, early steps amplify errors 1000-fold.
_MAX_LATENT = 6.0


class TimeEmbedding(nn.Module):
    """256 sinusoids of 1000·t, then linear → SiLU → linear."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FEATURES, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, time: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """time [...] in [0, 1] → [..., d]."""
        half = TIME_FEATURES // 2
        exponent = torch.arange(half, device=time.device, dtype=torch.float32) / half
        angle = 1000.0 * time.float()[..., None] * torch.exp(-math.log(10_000.0) * exponent)
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype))  # type: ignore[no-any-return]


class AdaLNBlock(nn.Module):
    """x + gate · MLP(LN(x) · (1 + scale) + shift), the three from silu(condition); starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=_NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.modulation = nn.Linear(size, 3 * size)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x, condition [..., d] → [..., d]; the condition has been through SiLU."""
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)  # type: ignore[no-any-return]


class AdaLNNetwork(nn.Module):
    """(x, t, h) → a vector of latent size, fp32; zero until trained."""

    def __init__(self, hidden_size: int, latent_size: int, num_blocks: int) -> None:
        super().__init__()
        self.input_proj = nn.Linear(latent_size, hidden_size)
        self.hidden_proj = nn.Linear(hidden_size, hidden_size)
        self.time = TimeEmbedding(hidden_size)
        self.blocks = nn.ModuleList(AdaLNBlock(hidden_size) for _ in range(num_blocks))
        self.final_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS, elementwise_affine=False)
        self.final_modulation = nn.Linear(hidden_size, 2 * hidden_size)
        self.final = nn.Linear(hidden_size, latent_size)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Xavier weights; every modulation and the last layer zero, as in the reference."""
        init_linears(self, 0.02, generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
        zeros = [self.final, self.final_modulation]
        zeros += [block.modulation for block in self.blocks if isinstance(block, AdaLNBlock)]
        for layer in zeros:
            nn.init.zeros_(layer.weight)

    def condition(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part that depends on h alone, [..., d]: once per position, shared by repeats and sampler steps."""
        return self.hidden_proj(hidden.to(self.hidden_proj.weight.dtype))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x [..., R, l], time [..., R], condition [..., d] → [..., R, l]."""
        dtype = self.input_proj.weight.dtype
        mixed = F.silu(self.time(time, dtype) + condition.unsqueeze(-2))
        y = self.input_proj(x.to(dtype))
        for block in self.blocks:
            y = block(y, mixed)
        shift, scale = self.final_modulation(mixed).chunk(2, dim=-1)
        return linear_fp32(self.final, self.final_norm(y) * (1 + scale) + shift)


class DenoisingHead(GenerativeHead):
    """A head whose network takes noise off a latent.

    Args:
        num_repeats: R independent draws of noise and posterior for each position in a training step.
    """

    def __init__(self, hidden_size: int, latent_size: int, *, num_blocks: int, num_repeats: int) -> None:
        super().__init__(hidden_size, latent_size)
        self.num_repeats = num_repeats
        self.net = AdaLNNetwork(hidden_size, latent_size, num_blocks)
        self.net.reset_parameters(None)

    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """Xavier weights (``init_std`` is not used), zero modulations and last layer."""
        self.net.reset_parameters(generator)

    def _draw_posterior(
        self, name: str, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """z of posteriors [B, p, l] → fp32 [B, p, R, l]; ``name`` keys the noise."""
        drawn = noise.normal(name, self.num_repeats, self.latent_size) * log_std.float().exp().unsqueeze(-2)
        return drawn.add_(mean.float().unsqueeze(-2))


class FlowHead(DenoisingHead):
    """x_t = (1 − t)·x_0 + t·z with x_0 ~ N(0, I), z ~ posterior, t ~ U[0, 1]; the target is z − x_0.

    Args:
        num_repeats: R independent (x_0, z, t) for each position in a training step.
        sampling_steps: midpoint steps; each evaluates the network twice.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        num_blocks: int,
        num_repeats: int = 8,
        sampling_steps: int = 4,
    ) -> None:
        super().__init__(hidden_size, latent_size, num_blocks=num_blocks, num_repeats=num_repeats)
        self.sampling_steps = sampling_steps

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Mean over R and l of ‖v(x_t, t, h) − (z − x_0)‖², [B, p]."""
        repeats, size = self.num_repeats, self.latent_size
        start = noise.normal("flow/start", repeats, size)
        end = self._draw_posterior("flow/posterior", mean, log_std, noise)
        time = noise.uniform("flow/time", repeats)
        x = torch.lerp(start, end, time[..., None])
        velocity: torch.Tensor = self.net(x, time, self.net.condition(hidden))
        return (velocity.float() - (end - start)).square().mean((-1, -2))

    def sample(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """hidden [..., d] → [num_samples, ..., l]; dx = v dt from t = 0 to 1 by the midpoint rule."""
        shape = (*hidden.shape[:-1], num_samples, self.latent_size)
        x = normal(shape, generator).to(hidden.device)
        condition = self.net.condition(hidden)
        step = 1.0 / self.sampling_steps
        for index in range(self.sampling_steps):
            time = torch.full(shape[:-1], index * step, device=x.device)
            middle = x + 0.5 * step * self.net(x, time, condition)
            x = x + step * self.net(middle, time + 0.5 * step, condition)
        latents: torch.Tensor = x.movedim(-2, 0)
        return latents


def cosine_alpha_bar(num_steps: int) -> torch.Tensor:
    """ᾱ_1 … ᾱ_T of the cosine schedule, fp64 [T]: products of 1 − β_t with β_t clipped at 0.999."""
    time = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    curve = torch.cos((time + 0.008) / 1.008 * math.pi / 2).square()
    betas = (1 - curve[1:] / curve[:-1]).clamp(max=_MAX_BETA)
    return torch.cumprod(1 - betas, dim=0)


class DiffusionHead(DenoisingHead):
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
        super().__init__(hidden_size, latent_size, num_blocks=num_blocks, num_repeats=num_repeats)
        self.train_timesteps = train_timesteps
        self.sampling_steps = min(sampling_steps, train_timesteps)

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Mean over R and l of ‖ε̂(x_t, t, h) − ε‖², [B, p]."""
        repeats, size = self.num_repeats, self.latent_size
        latent = self._draw_posterior("diffusion/posterior", mean, log_std, noise)
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
