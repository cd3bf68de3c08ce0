"""The torch module of the head."""

from __future__ import annotations

import torch
from torch import nn

from calm_scale.lm.heads.base import GenerativeHead, init_linears
from calm_scale.runtime.noise import normal


def spread(x, y):
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().mean(-1).neg().exp().mean((-1, -2))


class MmdModule(GenerativeHead):
    def __init__(self, hidden_size, latent_size, num_samples):
        super().__init__(hidden_size, latent_size)
        self.num_samples = num_samples
        self.mix = nn.Linear(2 * hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, latent_size)

    def reset_parameters(self, init_std, generator=None):
        init_linears(self, init_std, generator)

    def forward(self, hidden, noise):
        hidden = hidden.unsqueeze(-2).expand(*noise.shape).to(self.weight_dtype)
        mixed = self.mix(torch.cat([noise.to(self.weight_dtype), hidden], -1))
        return self.out(nn.functional.silu(mixed)).float()

    def loss(self, hidden, mean, log_std, noise):
        x = self(hidden, noise.normal("mmd/head", self.num_samples, self.hidden_size))
        drawn = noise.normal("mmd/posterior", self.num_samples, self.latent_size)
        y = mean.unsqueeze(-2) + log_std.exp().unsqueeze(-2) * drawn
        return spread(x, x) - 2 * spread(x, y) + spread(y, y)

    def sample(self, hidden, num_samples, generator):
        shape = (*hidden.shape[:-1], num_samples, self.hidden_size)
        return self(hidden, normal(shape, generator).to(hidden.device)).movedim(-2, 0)
