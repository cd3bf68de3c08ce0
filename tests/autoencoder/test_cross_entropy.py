"""The sliced cross-entropy against PyTorch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from calm_scale.autoencoder import cross_entropy
from calm_scale.autoencoder.cross_entropy import tied_cross_entropy

V, A = 29, 6


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 2, A, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(V, A, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (3, 5, 2), generator=g)
    counted = torch.rand(3, 5, 2, generator=g) < 0.7
    return hidden, weight, targets, counted


@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
def test_equals_the_whole_form_at_every_slice_size(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(cross_entropy, "slice_rows", lambda vocab_size, device_type: rows)
    hidden, weight, targets, counted = problem(torch.float64)
    total, hits = tied_cross_entropy(hidden, weight, targets, counted)
    have = torch.autograd.grad(3.5 * total, [hidden, weight])
    logits = F.linear(hidden, weight)
    want = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
    assert total.item() == pytest.approx(want.item(), rel=1e-12)
    assert hits.item() == int((logits.argmax(-1) == targets)[counted].sum())
    for one, other in zip(have, torch.autograd.grad(3.5 * want, [hidden, weight]), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_no_gradient_is_formed_where_none_is_wanted() -> None:
    hidden, weight, targets, counted = problem(torch.float32)
    with torch.no_grad():
        total, _ = tied_cross_entropy(hidden, weight, targets, counted)
    assert not total.requires_grad
    assert not tied_cross_entropy(hidden.detach(), weight.detach(), targets, counted)[0].requires_grad


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, counted = problem(torch.float32)
    total, _ = tied_cross_entropy(hidden * 1e4, weight, targets, counted)
    grads = torch.autograd.grad(total, [hidden, weight])
    assert torch.isfinite(total) and all(torch.isfinite(grad).all() for grad in grads)


def test_bf16_products_with_fp32_sums() -> None:
    hidden, weight, targets, counted = problem(torch.float32)
    exact, _ = tied_cross_entropy(hidden, weight, targets, counted)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = tied_cross_entropy(hidden, weight, targets, counted)
    grad_hidden, grad_weight = torch.autograd.grad(total, [hidden, weight])
    want_hidden, want_weight = torch.autograd.grad(exact, [hidden, weight])
    assert total.dtype == grad_hidden.dtype == grad_weight.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-2)
    assert torch.allclose(grad_hidden, want_hidden, atol=0.05) and torch.allclose(
        grad_weight, want_weight, atol=0.1
    )
