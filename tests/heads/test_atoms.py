"""The exact score of weighted atoms: against sums over every pair, its gradient, its propriety."""

from __future__ import annotations

import math

import pytest
import torch

from calm_scale.lm.heads.atoms.module import AtomHead
from calm_scale.lm.heads.atoms.score import AtomScore
from calm_scale.runtime.noise import PositionNoise

B, P, C, L, M = 2, 19, 7, 3, 5
NOISE = PositionNoise(0, 4, [3, 8], range(P))


def scene(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    atoms = torch.randn(B, P, C, L, generator=g, dtype=dtype)
    atoms[:, :, 1] = atoms[:, :, 0]  # two that coincide
    atoms[:, :, 2] = atoms[:, :, 3] + 1e-3  # and two near each other
    logits, mean, log_std = (torch.randn(B, P, n, generator=g, dtype=dtype) for n in (C, L, L))
    return atoms, logits, mean, log_std - 1


def every_pair(score, atoms, logits, mean, log_std):
    law = logits.softmax(-1)
    drawn = NOISE.normal("posterior/0", M, L).to(atoms.dtype)
    z = mean[:, :, None] + log_std.exp()[:, :, None] * drawn
    squared = (z[:, :, :, None] - atoms[:, :, None]).square().sum(-1)  # [B, P, M, C]
    value = 2 * (law[:, :, None] * squared ** (score.alpha / 2)).sum(-1).mean(-1)
    for c in range(C):
        for d in range(C):
            if c != d and (c, d) not in ((0, 1), (1, 0)):  # coincident: distance 0, gradient 0
                apart = (atoms[:, :, c] - atoms[:, :, d]).square().sum(-1) ** (score.alpha / 2)
                value = value - law[..., c] * law[..., d] * apart
    likelihood = torch.logsumexp(law.log()[:, :, None] - squared / (2 * score.log_scale**2), -1)
    return value - score.log_weight * likelihood.mean(-1)


@pytest.mark.parametrize(("alpha", "log_weight"), [(1.0, 0.0), (1.0, 0.3), (0.5, 0.0), (1.5, 0.1)])
def test_value_and_gradient_are_those_of_a_sum_over_every_pair(alpha, log_weight, monkeypatch):
    monkeypatch.setattr("calm_scale.lm.heads.atoms._CHUNK_ELEMENTS", 1)  # one block of positions a chunk
    score = AtomScore(M, alpha, log_weight, 0.6)
    atoms, logits, mean, log_std = scene()
    pull = torch.randn(B, P, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = []
    for value_of in (
        lambda a, w: score(a, w, mean, log_std, NOISE),
        lambda a, w: every_pair(score, a, w, mean, log_std),
    ):
        inputs = [x.clone().requires_grad_() for x in (atoms, logits)]
        value = value_of(*inputs)
        found.append((value.detach(), *torch.autograd.grad((value * pull).sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(score(atoms, logits, mean, log_std, NOISE), found[1][0])


def test_fp32_stays_near_fp64_where_atoms_nearly_coincide():
    score = AtomScore(M, 1.0, 0.1)
    found = []
    for dtype in (torch.float32, torch.float64):
        atoms, logits, mean, log_std = (x.to(dtype) for x in scene())
        inputs = [atoms.requires_grad_(), logits.requires_grad_()]
        value = score(*inputs, mean, log_std, NOISE)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("log_weight", [0.0, 0.1])
def test_the_true_law_on_a_known_support_is_where_the_expected_score_is_stationary_and_least(log_weight):
    """Codes farther apart than σ: the expectation over targets, taken exactly, is least at the true weights."""
    codes = 8 * torch.eye(4, dtype=torch.float64)
    truth = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    noise = PositionNoise(0, 0, [0], range(4))
    score = AtomScore(1, 1.0, log_weight)

    def expected(logits):
        atoms, mean = codes.expand(1, 4, 4, 4), codes[None]
        value = score(atoms, logits.expand(1, 4, 4), mean, torch.full_like(mean, -40.0), noise)
        return (value[0] * truth).sum()

    logits = truth.log().requires_grad_()
    best = expected(logits)
    (slope,) = torch.autograd.grad(best, logits)
    assert slope.abs().max() < 1e-9
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        other = truth.log() + 0.3 * torch.randn(4, generator=g, dtype=torch.float64)
        assert expected(other) > best


def test_samples_are_the_atoms_in_the_frequencies_of_the_law():
    head = AtomHead(8, 3, num_atoms=5)
    torch.nn.init.normal_(head.mixture.logits.weight, std=1.0, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        atoms, weights = head.law(hidden)
        drawn = head.sample(hidden, 4000, torch.Generator().manual_seed(2))
    which = (drawn[:, :, None] - atoms).norm(dim=-1)
    assert which.min(-1).values.max() == 0
    share = torch.nn.functional.one_hot(which.argmin(-1), 5).double().mean(0)
    assert (share - weights).abs().max() < 5 * math.sqrt(0.25 / 4000)
