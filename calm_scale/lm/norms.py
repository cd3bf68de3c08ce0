"""Norms whose parameters carry Megatron's ``sequence_parallel`` mark.

With sequence parallelism each tensor-parallel rank normalises its own positions, so the gradient of a norm's
weight is a partial sum; Megatron adds them up over the group for every parameter that carries the mark.
"""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in Megatron's layer-spec signature."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=getattr(config, "params_dtype", None)))
        mark_sequence_parallel(self, bool(getattr(config, "sequence_parallel", False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] → [..., d]."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with weight and bias, marked the same way."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=getattr(config, "params_dtype", None))
        mark_sequence_parallel(self, bool(getattr(config, "sequence_parallel", False)))


def mark_sequence_parallel(module: nn.Module, enabled: bool) -> None:
    """Tell Megatron whether this module's parameters see only a slice of the positions."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = enabled  # type: ignore[attr-defined]
