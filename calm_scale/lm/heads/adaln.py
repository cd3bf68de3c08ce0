"""The network that flow matching and diffusion share: adaLN blocks conditioned on time and hidden state."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from calm_scale.lm.heads.base import init_linears, linear_fp32

_NORM_EPS = 1e-6
_FREQUENCIES = 256


class TimeEmbedding(nn.Module):
    """256 sinusoids of 1000·t, then linear → SiLU → linear."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, time: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """time [...] in [0, 1] → [..., d]."""
        half = _FREQUENCIES // 2
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
