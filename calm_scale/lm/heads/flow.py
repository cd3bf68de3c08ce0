"""Flow matching: learn the velocity from noise to the posterior, integrate it with the midpoint rule."""

from __future__ import annotations

import torch

from calm_scale.lm.heads.adaln import AdaLNNetwork
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.runtime.noise import PositionNoise
from calm_scale.runtime.streams import Randomness, normal


class FlowHead(GenerativeHead):
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
        super().__init__(hidden_size, latent_size)
        self.num_repeats = num_repeats
        self.sampling_steps = sampling_steps
        self.net = AdaLNNetwork(hidden_size, latent_size, num_blocks)
        self.net.reset_parameters(None)

    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """Xavier weights (``init_std`` is not used), zero modulations and last layer."""
        self.net.reset_parameters(generator)

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Mean over R and l of ‖v(x_t, t, h) − (z − x_0)‖², [B, p]."""
        repeats, size = self.num_repeats, self.latent_size
        start = noise.normal("flow/start", repeats, size)
        end = noise.normal("flow/posterior", repeats, size) * log_std.float().exp().unsqueeze(-2)
        end += mean.float().unsqueeze(-2)
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
