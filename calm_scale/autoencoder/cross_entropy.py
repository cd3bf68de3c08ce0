"""Cross-entropy through the tied embedding without ever holding all logits.

With V = 128 256 the fp32 logits of one micro-batch of 32k tokens would take 17 GB, and their gradient as much again.
Here a slice of rows at a time goes forward, and its gradient is formed at once while the slice is at hand: the same
three matrix products, memory for one slice. The weight is needed in the forward pass only, so nothing has to
be gathered again for the backward pass under ZeRO-3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_MIN_ROWS = 64
_SLICE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Logits alive at once: what fits a core's cache, or 1 GiB of fp32 on a GPU."""


def slice_rows(vocab_size: int, device_type: str) -> int:
    """Rows of [·, V] logits to work on at once."""
    return max(_MIN_ROWS, _SLICE_ELEMENTS.get(device_type, 1 << 20) // vocab_size)


def tied_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ −log softmax(hidden · weightᵀ)[target] over counted rows, nats, and how many argmaxes hit.

    Args:
        hidden: [..., a].
        weight: [V, a].
        targets: int64 [...].
        counted: bool [...]; other rows add nothing and get no gradient.

    Returns:
        The sum in fp32 (or wider), differentiable in ``hidden`` and ``weight``; the int64 number of hits. Matrix
        products run in the autocast dtype where one is active, sums in fp32.
    """
    rows = hidden.flatten(0, -2)
    needed = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    out: tuple[torch.Tensor, torch.Tensor] = _TiedCrossEntropy.apply(
        rows, weight, targets.flatten(), counted.flatten(), needed
    )
    return out


class _TiedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        needed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        wide = torch.promote_types(product, torch.float32)
        inputs, matrix = hidden.to(product), weight.to(product)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needed else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed else None
        step = slice_rows(weight.shape[0], kind)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            target, count = targets[part].unsqueeze(-1), counted[part]
            with torch.autocast(kind, enabled=False):
                logits = F.linear(inputs[part], matrix).to(wide)
                hits += ((logits.argmax(dim=-1) == target.squeeze(-1)) & count).sum()
                log_probs = F.log_softmax(logits, dim=-1)
                total -= (log_probs.gather(-1, target).squeeze(-1) * count).sum()
                if grad_hidden is None or grad_weight is None:
                    continue
                grad = log_probs.exp_()
                grad.scatter_(-1, target, grad.gather(-1, target) - 1)
                grad = grad.mul_(count.unsqueeze(-1)).to(product)
                grad_hidden[part] = grad @ matrix
                grad_weight += grad.t() @ inputs[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            (grad_hidden * scale).to(grad_hidden.dtype),
            (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
