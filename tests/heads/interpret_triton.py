"""Run by test_energy_score_triton.py in its own process with TRITON_INTERPRET=1: the kernels against float64."""

from __future__ import annotations

import torch

from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.energy_score_triton import posterior_noise
from calm_scale.runtime.noise import PositionNoise


def _literal(samples, z, alpha):
    """Eq. (10) by broadcasting, float64; pairs at distance 0 are left out."""

    def powered(difference):
        squared = difference.square().sum(-1)
        safe = torch.where(squared > 0, squared, torch.ones_like(squared))
        return torch.where(squared > 0, safe ** (alpha / 2), torch.zeros_like(squared))

    num_samples, num_posterior = samples.shape[-2], z.shape[-2]
    fit = powered(samples[..., :, None, :] - z[..., None, :, :]).sum((-1, -2))
    spread = powered(samples[..., :, None, :] - samples[..., None, :, :]).sum((-1, -2))
    return 2 * fit / (num_samples * num_posterior) - spread / (num_samples * (num_samples - 1))


def _compare(num_samples, num_posterior, size, alpha, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    noise = PositionNoise(1, 2, [5], range(3, 6))
    samples = torch.randn(1, 3, num_samples, size, generator=g).to(dtype)
    samples[0, 0, 1] = samples[0, 0, 0]  # two coincident model samples
    mean = torch.randn(1, 3, size, generator=g)
    log_std = torch.randn(1, 3, size, generator=g) * 0.2 - 1
    ours, exact = samples.clone().requires_grad_(), samples.double().requires_grad_()
    scale = torch.linspace(0.5, 2, 3)
    loss = energy_score(
        ours, mean, log_std, noise, num_posterior=num_posterior, alpha=alpha, backend="triton"
    )
    (loss * scale).sum().backward()
    eps = posterior_noise(noise, num_posterior, size).double()
    z = mean.double()[:, :, None] + log_std.double().exp()[:, :, None] * eps
    reference = _literal(exact, z, alpha)
    (reference * scale.double()).sum().backward()
    torch.testing.assert_close(loss.double(), reference, rtol=2e-6, atol=2e-6)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        again = energy_score(
            ours, mean, log_std, noise, num_posterior=num_posterior, alpha=alpha, backend="triton"
        )
    torch.testing.assert_close(again, loss.detach())


def _noise_is_normal_and_keyed():
    noise = PositionNoise(1, 2, [5, 6], range(0, 8))
    eps = posterior_noise(noise, 40, 128)
    assert abs(eps.mean()) < 0.02 and abs(eps.var() - 1) < 0.03
    flat = eps.view(16, -1)
    assert (torch.corrcoef(flat) - torch.eye(16)).abs().max() < 0.08
    assert (torch.corrcoef(eps[0, 0]) - torch.eye(40)).abs().max() < 0.45
    part = posterior_noise(PositionNoise(1, 2, [6], range(2, 5)), 40, 128)
    assert torch.equal(part, eps[1:, 2:5])


def _coincident_with_everything_is_finite(alpha):
    noise = PositionNoise(1, 2, [5], range(0, 2))
    samples = torch.zeros(1, 2, 3, 4, requires_grad=True)
    silent = torch.full((1, 2, 4), -200.0)
    loss = energy_score(
        samples, torch.zeros(1, 2, 4), silent, noise, num_posterior=5, alpha=alpha, backend="triton"
    )
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(1, 2)) and torch.equal(samples.grad, torch.zeros_like(samples))


def _a_bad_sample_is_not_hidden():
    noise = PositionNoise(1, 2, [5], range(0, 2))
    samples = torch.randn(1, 2, 3, 4)
    samples[0, 1, 2, 3] = float("nan")
    zeros = torch.zeros(1, 2, 4)
    samples.requires_grad_()
    loss = energy_score(samples, zeros, zeros, noise, num_posterior=5, backend="triton")
    loss.sum().backward()
    assert torch.isfinite(loss[0, 0]) and torch.isnan(loss[0, 1])
    assert torch.isfinite(samples.grad[0, 0]).all() and torch.isnan(samples.grad[0, 1, 2]).any()


if __name__ == "__main__":
    for alpha in (0.5, 0.75, 1.0, 1.5, 1.75, 2.0):
        _compare(4, 6, 8, alpha)
        _coincident_with_everything_is_finite(alpha)
    _compare(3, 5, 6, 1.0)  # neither N, M nor l a power of two
    _compare(8, 21, 128, 1.0)
    _compare(4, 6, 8, 1.0, torch.bfloat16)
    _noise_is_normal_and_keyed()
    _a_bad_sample_is_not_hidden()
    print("interpreted kernels agree with float64")
