"""AdamW for ZeRO stage 0, where DeepSpeed itself neither reports a gradient norm nor skips a non-finite step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class GuardedAdamW(torch.optim.AdamW):
    """Clips by the global norm and leaves everything unchanged when that norm is not finite.

    ``_global_grad_norm`` and ``overflow`` are what DeepSpeed reads off an optimizer after ``step``. Gradients
    are already averaged over ranks here, so every rank computes the same norm and takes the same branch.
    """

    def __init__(self, *args: Any, clip_norm: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clip_norm = clip_norm
        self._global_grad_norm = 0.0
        self.overflow = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update, or none at all."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self._clip_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        super().step(closure)
