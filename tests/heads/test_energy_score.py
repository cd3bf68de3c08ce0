"""The energy loss against the literal double loop of Eq. (10) in float64."""

from __future__ import annotations

import pytest
import torch

from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.heads.energy import DRAWS
from calm_scale.runtime.noise import PositionNoise

ALPHAS = [0.5, 0.75, 1.0, 1.5, 1.75, 2.0]


def _noise(batch, positions):
    return PositionNoise(3, 5, list(range(batch)), range(0, positions))


def _problem(batch=2, positions=19, num_samples=5, size=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    samples = torch.randn(batch, positions, num_samples, size, generator=g)
    mean = torch.randn(batch, positions, size, generator=g)
    log_std = torch.randn(batch, positions, size, generator=g) * 0.3 - 1
    return samples, mean, log_std, _noise(batch, positions)


def _posterior(mean, log_std, noise, num_posterior):
    """[B, p, M, l] in float64: the very numbers the loss draws."""
    parts = [
        noise.normal(f"posterior/{first}", min(DRAWS, num_posterior - first), mean.shape[-1])
        for first in range(0, num_posterior, DRAWS)
    ]
    return mean.double()[:, :, None] + log_std.double().exp()[:, :, None] * torch.cat(parts, 2).double()


def _literal(samples, z, alpha):
    """Eq. (10) position by position, pair by pair; autograd through safe distances (coincident → constant 0)."""

    def distance(a, b):
        squared = (a - b).square().sum()
        return squared ** (alpha / 2) if squared > 0 else squared.detach() * 0

    batch, positions, num_samples, _ = samples.shape
    num_posterior = z.shape[2]
    out = []
    for b in range(batch):
        for p in range(positions):
            fit = sum(distance(z[b, p, m], x) for m in range(num_posterior) for x in samples[b, p])
            spread = sum(
                distance(samples[b, p, n], samples[b, p, k])
                for n in range(num_samples)
                for k in range(num_samples)
                if n != k
            )
            out.append(2 * fit / (num_samples * num_posterior) - spread / (num_samples * (num_samples - 1)))
    return torch.stack(out).view(batch, positions)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equals_the_double_loop_and_its_gradient(alpha):
    samples, mean, log_std, noise = _problem()
    ours, exact = samples.clone().requires_grad_(), samples.double().requires_grad_()
    scale = torch.linspace(0.5, 2, noise.shape[1])
    loss = energy_score(ours, mean, log_std, noise, num_posterior=7, alpha=alpha)
    (loss * scale).sum().backward()
    reference = _literal(exact, _posterior(mean, log_std, noise, 7), alpha)
    (reference * scale.double()).sum().backward()
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-5, atol=2e-6)


def test_gradcheck_in_float64():
    samples, mean, log_std, noise = _problem(1, 3, 3, 4)
    samples = samples.double().requires_grad_()

    def loss(x):
        return energy_score(x, mean.double(), log_std.double(), noise, num_posterior=5, alpha=1.3)

    assert torch.autograd.gradcheck(loss, samples)


def test_many_draws_walk_in_chunks():
    samples, mean, log_std, noise = _problem(1, 2, 2, 3)
    loss = energy_score(samples, mean, log_std, noise, num_posterior=2 * DRAWS + 3)
    z = _posterior(mean, log_std, noise, 2 * DRAWS + 3)
    torch.testing.assert_close(loss.double(), _literal(samples.double(), z, 1.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coincident_points_have_finite_gradients(alpha, dtype):
    _, mean, log_std, noise = _problem(1, 4, 4, 6)
    mean = mean.to(dtype).float()
    together = mean[:, :, None].expand(1, 4, 4, 6).to(dtype).clone().requires_grad_()
    silent = torch.full_like(
        log_std, -200.0
    )  # σ = 0: every posterior sample is the mean, as every model sample
    loss = energy_score(together, mean, silent, noise, num_posterior=3, alpha=alpha)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(together.grad, torch.zeros_like(together.grad))
    together.grad = None
    energy_score(together, mean, log_std, noise, num_posterior=3, alpha=alpha).sum().backward()
    assert torch.isfinite(together.grad).all() and together.grad.abs().sum() > 0


@pytest.mark.parametrize("alpha", [0.75, 1.0, 1.5])
@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_accurate_where_samples_almost_hit_the_posterior_draws(alpha, gap):
    """|x|² + |y|² − 2x·y has lost every digit at these gaps; loss and gradient have not."""
    _, mean, log_std, noise = _problem(1, 5, 2, 8)
    mean = torch.zeros_like(mean)
    z = _posterior(mean, log_std, noise, 2)
    direction = torch.nn.functional.normalize(torch.ones_like(z), dim=-1)
    samples = (z + gap * direction).float()  # sample n sits `gap` away from draw n
    ours, exact = samples.clone().requires_grad_(), samples.double().requires_grad_()
    energy_score(ours, mean, log_std, noise, num_posterior=2, alpha=alpha).sum().backward()
    e32 = torch.exp(log_std)[:, :, None] * noise.normal("posterior/0", 2, 8)  # the draws as fp32 holds them
    _literal(exact, e32.double(), alpha).sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-4, atol=1e-6)


def test_a_bad_sample_is_not_hidden():
    samples, mean, log_std, noise = _problem(1, 2, 3, 4)
    samples[0, 1, 2, 3] = float("nan")
    samples.requires_grad_()
    loss = energy_score(samples, mean, log_std, noise, num_posterior=5)
    loss.sum().backward()
    assert torch.isfinite(loss[0, 0]) and torch.isnan(loss[0, 1])
    assert torch.isfinite(samples.grad[0, 0]).all() and torch.isnan(samples.grad[0, 1, 2]).any()


def test_bf16_samples_are_computed_in_fp32():
    samples, mean, log_std, noise = _problem()
    low = samples.bfloat16().requires_grad_()
    loss = energy_score(low, mean, log_std, noise, num_posterior=4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, energy_score(low.detach().float(), mean, log_std, noise, num_posterior=4)
    )
    loss.sum().backward()
    assert low.grad.dtype == torch.bfloat16


def test_a_slice_of_positions_has_the_slice_of_the_loss():
    samples, mean, log_std, noise = _problem(2, 40)
    whole = energy_score(samples, mean, log_std, noise, num_posterior=6)
    part = PositionNoise(3, 5, [1], range(13, 37))
    sliced = energy_score(samples[1:, 13:37], mean[1:, 13:37], log_std[1:, 13:37], part, num_posterior=6)
    torch.testing.assert_close(sliced, whole[1:, 13:37], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.75])
def test_the_true_law_has_the_lowest_loss(alpha):
    """Strictly proper: shifted, narrower, wider and mean-only models all score worse than the posterior itself."""
    batch, positions, size = 4, 256, 3
    noise = _noise(batch, positions)
    mean = torch.randn(batch, positions, size, generator=torch.Generator().manual_seed(1))
    log_std = torch.full((batch, positions, size), -0.5)
    eps = noise.normal("model", 4, size)

    def score(scale, shift):
        samples = mean[:, :, None] + shift + scale * log_std.exp()[:, :, None] * eps
        return energy_score(samples, mean, log_std, noise, num_posterior=16, alpha=alpha).mean().item()

    best = score(1.0, 0.0)
    for scale, shift in [(0.0, 0.0), (0.6, 0.0), (1.6, 0.0), (1.0, 0.4)]:
        assert score(scale, shift) > best + 0.005


def test_at_alpha_2_only_the_mean_of_the_samples_counts():
    """Proper, not strictly: any spread around the right mean scores alike, a wrong mean worse."""
    batch, positions, size = 8, 512, 3
    noise = _noise(batch, positions)
    mean = torch.zeros(batch, positions, size)
    log_std = torch.full((batch, positions, size), -0.5)
    eps = noise.normal("model", 4, size)

    def score(scale, shift):
        samples = shift + scale * log_std.exp()[:, :, None] * eps
        return energy_score(samples, mean, log_std, noise, num_posterior=16, alpha=2.0).mean().item()

    best = score(1.0, 0.0)
    assert score(0.0, 0.0) == pytest.approx(best, abs=0.03)
    assert score(1.6, 0.0) == pytest.approx(best, abs=0.06)
    assert score(1.0, 0.4) > best + 0.5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"alpha": 2.01}, "0 < alpha <= 2"),
        ({"alpha": 0.0}, "0 < alpha <= 2"),
        ({"num_posterior": 0}, "at least 1"),
        ({"samples": torch.zeros(2, 19, 1, 6)}, "N >= 2"),
        ({"mean": torch.zeros(2, 19, 5)}, "must both be"),
        ({"noise": _noise(2, 18)}, "keyed for positions"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    samples, mean, log_std, noise = _problem()
    given = {"samples": samples, "mean": mean, "log_std": log_std, "noise": noise, "num_posterior": 4}
    with pytest.raises(ValueError, match=message):
        energy_score(**{**given, **change})
