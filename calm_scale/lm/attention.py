"""Core attention through ``scaled_dot_product_attention``: scores are never materialised, keys can be cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class LayerCache:
    """Keys and values of one layer: buffers [b, g, max_positions, d_h], ``length`` positions filled."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [b, g, n, d_h] behind what is there; return everything so far [b, g, length, d_h]."""
        stop = self.length + key.shape[2]
        self.keys[:, :, self.length : stop] = key
        self.values[:, :, self.length : stop] = value
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class SdpaCoreAttention(nn.Module):
    """Causal attention in the signature of Megatron's layer spec.

    Input query [s, b, h, d_h], key and value [s, b, g, d_h] (g key/value heads); output [s, b, h·d_h].
    """

    def __init__(self, config: object, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = softmax_scale
        self.cache: LayerCache | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Attend causally, to the cached positions too when a cache is attached. ``attention_mask`` is not used."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.cache is not None:
            k, v = self.cache.append(k, v)
        num_new, num_all = q.shape[2], k.shape[2]
        mask = None
        if 1 < num_new < num_all:
            mask = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device).tril(num_all - num_new)
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=num_new == num_all,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def attached(attentions: list[SdpaCoreAttention], caches: list[LayerCache]) -> Iterator[None]:
    """Let these layers read and extend these caches for the duration of a forward pass."""
    for attention, cache in zip(attentions, caches, strict=True):
        attention.cache = cache
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None
