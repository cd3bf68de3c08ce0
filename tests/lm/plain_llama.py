"""The same network written out in plain PyTorch from its formulas, to compare the Megatron model with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [b, P, h, d_h]: pairs (i, i + d_h/2) turn by position · theta^(−2i/d_h)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequency)[None, :, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, c: Any) -> torch.Tensor:
    """Grouped-query attention; ``qkv`` [g·(h/g + 2)·d_h, d] holds, group by group, its queries, key and value."""
    b, num, _ = x.shape
    per_group = c.num_heads // c.query_groups
    mixed = (x @ qkv.T).view(b, num, c.query_groups, per_group + 2, c.head_dim)
    q = rotate(mixed[:, :, :, :per_group].reshape(b, num, c.num_heads, c.head_dim), c.rope_theta)
    k = rotate(mixed[:, :, :, per_group], c.rope_theta).repeat_interleave(per_group, dim=2)
    v = mixed[:, :, :, per_group + 1].repeat_interleave(per_group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(c.head_dim)
    future = torch.ones(num, num, dtype=torch.bool).triu(1)
    law = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", law, v).reshape(b, num, -1) @ out.T


def hidden_states(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, c: Any, patch_size: int
) -> torch.Tensor:
    """Tokens [b, P·K] → final hidden states [b, P, d]; ``weights`` by the model's own parameter names."""
    w = weights
    table = w["compressor.tokens.embedding.table.weight"]
    x = table[tokens].view(tokens.shape[0], -1, patch_size * table.shape[1])
    x = F.silu(x @ w["compressor.tokens.expand.weight"].T + w["compressor.tokens.expand.bias"])
    x = x @ w["compressor.tokens.contract.weight"].T + w["compressor.tokens.contract.bias"]
    x = F.layer_norm(x, x.shape[-1:], w["compressor.norm.weight"], w["compressor.norm.bias"], c.norm_eps)
    for i in range(c.num_layers):
        p = f"decoder.layers.{i}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], c.norm_eps)
        x = x + attention(
            y, w[p + "self_attention.linear_qkv.weight"], w[p + "self_attention.linear_proj.weight"], c
        )
        y = rms_norm(x, w[p + "pre_mlp_layernorm.weight"], c.norm_eps)
        gate, up = (y @ w[p + "mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w[p + "mlp.linear_fc2.weight"].T
    return rms_norm(x, w["decoder.final_layernorm.weight"], c.norm_eps)
