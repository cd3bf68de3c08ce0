"""A plain PyTorch CALM, written straight from the paper's formulas: what the figures are measured against.

Nothing is shared and nothing is chunked: h is repeated for every sample, x ‖ h is concatenated, and the energy
loss broadcasts all N·M differences of every position before it takes their norm.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, ffn_size, bias=False)
        self.up = nn.Linear(size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Llama layer: RMSNorm → causal attention with RoPE → RMSNorm → SwiGLU."""

    def __init__(self, size: int, num_heads: int, ffn_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_ffn = RMSNorm(size), RMSNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.ffn = SwiGLU(size, ffn_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm_attention(x)
        q, k, v = (w(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm_ffn(x))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Backbone(nn.Module):
    """Patch tokens [B, P, K] → hidden states [B, P, d]."""

    def __init__(
        self, vocab_size: int, patch_size: int, size: int, num_layers: int, num_heads: int, ffn_size: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, size)
        self.compressor = nn.Sequential(
            nn.Linear(patch_size * size, 2 * size),
            nn.SiLU(),
            nn.Linear(2 * size, size),
            nn.LayerNorm(size, eps=1e-6),
        )
        self.layers = nn.ModuleList(Layer(size, num_heads, ffn_size) for _ in range(num_layers))
        self.norm = RMSNorm(size)
        self.head_dim = size // num_heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.compressor(self.embedding(tokens).flatten(-2))
        frequency = 10_000 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return self.norm(x)


class RepeatedBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(2 * size, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 2 * size)
        )
        self.down = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        gate, up = self.mlp(torch.cat([self.norm(x), h], dim=-1)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class RepeatedHead(nn.Module):
    """The energy head one sample at a time: h is projected again for each of the N samples."""

    def __init__(self, size: int, latent_size: int, num_blocks: int, noise_size: int = 64) -> None:
        super().__init__()
        self.noise_size = noise_size
        self.noise, self.hidden = nn.Linear(noise_size, size), nn.Linear(size, size)
        self.norm_noise, self.norm_hidden = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.blocks = nn.ModuleList(RepeatedBlock(size) for _ in range(num_blocks))
        self.final = nn.Sequential(
            nn.LayerNorm(size, eps=1e-6), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, latent_size)
        )
        nn.init.zeros_(self.final[3].weight)
        nn.init.zeros_(self.final[3].bias)

    def forward(self, h: torch.Tensor, num_samples: int) -> torch.Tensor:
        """h [..., d] → [N, ..., l]."""
        h = h.expand(num_samples, *h.shape)
        x = self.norm_noise(self.noise(torch.rand(*h.shape[:-1], self.noise_size) - 0.5))
        h = self.norm_hidden(self.hidden(h))
        for block in self.blocks:
            x = block(x, h)
        return self.final(x)


def literal_energy_loss(
    samples: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, num_posterior: int
) -> torch.Tensor:
    """Eq. (10) with α = 1 by broadcasting: samples [N, ..., l], mean and log_std [..., l] → [...]."""
    n = samples.shape[0]
    z = mean + log_std.exp() * torch.randn(num_posterior, *mean.shape)
    fit = torch.linalg.vector_norm(z[:, None] - samples[None], dim=-1).mean((0, 1))
    spread = torch.linalg.vector_norm(samples[:, None] - samples[None], dim=-1).sum((0, 1))
    return 2 * fit - spread / (n * (n - 1))


class Encoder(nn.Module):
    """The frozen patch encoder: tokens [..., K] → mean and log σ [..., l]."""

    def __init__(self, vocab_size: int, patch_size: int, size: int, ffn_size: int, latent_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, size)
        self.norms = nn.ModuleList(RMSNorm(size) for _ in range(3))
        self.blocks = nn.ModuleList(SwiGLU(size, ffn_size) for _ in range(2))
        self.squeeze = nn.Linear(patch_size * size, size)
        self.out = nn.Linear(size, 2 * latent_size)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        x = x + self.blocks[0](self.norms[0](x))
        x = self.squeeze(x.flatten(-2))
        x = x + self.blocks[1](self.norms[1](x))
        mean, log_std = self.out(self.norms[2](x)).chunk(2, dim=-1)
        return mean, log_std


class PlainCalm(nn.Module):
    """Backbone, repeated-h head and literal loss: tokens [B, P·K] → mean loss over the P − 1 predicted patches."""

    def __init__(
        self, backbone: Backbone, head: RepeatedHead, encoder: nn.Module, num_samples: int, num_posterior: int
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.encoder = encoder.requires_grad_(False)
        self.num_samples, self.num_posterior = num_samples, num_posterior

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean, log_std = self.encoder(patches[:, 1:])
        samples = self.head(self.backbone(patches)[:, :-1], self.num_samples)
        return literal_energy_loss(samples, mean, log_std, self.num_posterior).mean()
