"""Run by test_energy_score_triton.py in its own process with TRITON_INTERPRET=1: the kernels against float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.energy_score_triton import posterior_noise
from calm_scale.runtime.noise import PositionNoise, _mix
from calm_scale.runtime.noise_triton import _mixed, log2, normal_pair, sin_cos


@triton.jit
def _sin_cos_kernel(w_ptr, s_ptr, c_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s, c = sin_cos(tl.load(w_ptr + at))
    tl.store(s_ptr + at, s)
    tl.store(c_ptr + at, c)


@triton.jit
def _log2_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, log2(tl.load(x_ptr + at)))


@triton.jit
def _pair_kernel(a_ptr, b_ptr, first_ptr, second_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at).to(tl.uint32, bitcast=True)
    b = tl.load(b_ptr + at).to(tl.uint32, bitcast=True)
    first, second = normal_pair(a, b)
    tl.store(first_ptr + at, first)
    tl.store(second_ptr + at, second)


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


def _noise_has_the_law_of_a_normal():
    """Moments, tails and Kolmogorov-Smirnov of 2^18 draws; the four of a counter do not depend on each other."""
    eps = posterior_noise(PositionNoise(3, 4, [0, 7], range(3, 5)), 16, 4096).double()
    flat = eps.flatten()
    count = flat.numel()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = {1: 1, 2: 2, 3: 15, 4: 96, 6: 10170}[power] ** 0.5 / count**0.5  # of the mean of x^power
        assert abs(flat.pow(power).mean() - moment) < 4 * spread, power
    expected = torch.special.ndtr(flat.sort().values)
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((expected - ranks[:-1]).max(), (ranks[1:] - expected).max())
    assert distance < 1.95 / count**0.5  # exceeded by chance once in a thousand keys
    beyond = (flat.abs() > 4).double().mean()
    assert 1e-5 < beyond < 1.3e-4  # 6.3e-5 expected, 1.6e-5 standard deviation
    of_counter = eps.view(4, 4, 4, 4096).transpose(2, 3).reshape(-1, 4).T
    for values in (of_counter, of_counter.square(), of_counter.abs().log()):
        assert (torch.corrcoef(values) - torch.eye(4)).abs().max() < 4 / (count / 4) ** 0.5


def _the_smallest_and_largest_uniforms_give_finite_normals():
    words = torch.tensor([0, 1, 2**30, 2**31 - 1, -(2**31), -(2**31) + 1, -2, -1], dtype=torch.int32)
    a, b = (x.flatten().contiguous() for x in torch.meshgrid(words, words, indexing="ij"))
    first, second = torch.empty(64), torch.empty(64)
    _pair_kernel[(1,)](a, b, first, second, BLOCK=64)
    u = ((a.double() % 2**32 + 0.5) / 2**32).float().double()
    radius, angle = (-2 * u.log()).sqrt(), torch.pi * b.double() / 2**31
    torch.testing.assert_close(first.double(), radius * angle.cos(), rtol=0, atol=4e-6)
    torch.testing.assert_close(second.double(), radius * angle.sin(), rtol=0, atol=4e-6)


def _sine_and_cosine_keep_their_bound():
    """Numbers of [2^-16, 1] evenly by exponent, and 0; the polynomials are odd and even to the bit."""
    block = 1 << 20
    bits = torch.linspace(0x37800000, 0x3F800000, block, dtype=torch.float64).int()
    bits[0] = 0
    w = bits.view(torch.float32)
    s, c = torch.empty_like(w), torch.empty_like(w)
    _sin_cos_kernel[(1,)](w, s, c, BLOCK=block)
    angle = w.double() * (torch.pi / 2)
    for ours, exact in ((s, angle.sin()), (c, angle.cos())):
        assert (ours.double() - exact).abs_().max() < 2e-7
    torch.testing.assert_close(s.double(), angle.sin(), rtol=3e-7, atol=0)


def _the_logarithm_keeps_its_bound():
    block = 1 << 17
    g = torch.Generator().manual_seed(0)
    wide = torch.randint(0x00800000, 0x7F800000, (block,), generator=g)  # any normal positive number
    near_one = torch.arange(0x3F800000 - block // 2, 0x3F800000 + block // 2)
    for bits in (wide, near_one):
        x = bits.int().view(torch.float32)
        ours = torch.empty_like(x)
        _log2_kernel[(1,)](x, ours, BLOCK=block)
        torch.testing.assert_close(ours.double(), x.double().log2(), rtol=4e-7, atol=0)


@triton.jit
def _mixed_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, _mixed(tl.load(x_ptr + at)))


def _keys_are_mixed_as_by_torch():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**63), 2**63 - 1, (1024,), generator=g)
    x[:4] = torch.tensor([0, 1, -1, -(2**63)])
    mixed = torch.empty_like(x)
    _mixed_kernel[(1,)](x, mixed, BLOCK=1024)
    assert torch.equal(mixed, _mix(x))


class _OfAGpu(PositionNoise):
    """Draws as on a GPU."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._in_one_launch = True


def _rows_of_noise_are_keyed_by_sample_and_position():
    noise = _OfAGpu(1, 4, [7, 3], range(0, 18))
    for kind, size in (("normal", 1), ("uniform", 6), ("normal", 6)):
        whole = getattr(noise, kind)("head", size)
        part = _OfAGpu(1, 4, [3], range(5, 13))  # another sample first, other positions and blocks
        assert torch.equal(getattr(part, kind)("head", size), whole[1:, 5:13]), (kind, size)
    chunks = [(chunk.rows, chunk.normal("head", 6)) for chunk in noise.chunks(10)]
    assert len(chunks) > 2
    assert all(torch.equal(mine, whole.view(-1, 6)[rows]) for rows, mine in chunks)


def _every_part_of_a_key_makes_another_stream():
    def drawn(seed=1, step=4, namespace="train", name="head", ids=(7,)):
        return _OfAGpu(seed, step, ids, range(0, 2), namespace=namespace).normal(name, 3, 700)

    mine = drawn()
    assert mine.shape == (1, 2, 3, 700)
    for other in (drawn(seed=2), drawn(step=5), drawn(namespace="eval"), drawn(name="tail"), drawn(ids=(8,))):
        assert torch.corrcoef(torch.stack([mine.flatten(), other.flatten()]))[0, 1].abs() < 0.07


def _rows_of_noise_have_their_law():
    noise = _OfAGpu(5, 6, [1, 2], range(0, 2))
    normal = noise.normal("n", 64, 128).double()
    uniform = noise.uniform("u", 8192, low=-0.5, high=0.5).double()
    assert uniform.min() >= -0.5 and uniform.max() < 0.5
    count = uniform.numel()
    for values, law in ((normal.flatten(), torch.special.ndtr), (uniform.flatten(), lambda u: u + 0.5)):
        expected, ranks = law(values.sort().values), torch.arange(count + 1, dtype=torch.float64) / count
        distance = torch.maximum((expected - ranks[:-1]).max(), (ranks[1:] - expected).max())
        assert distance < 1.95 / count**0.5  # exceeded by chance once in a thousand keys
    quads = uniform.view(4, 4, -1).transpose(0, 1).reshape(4, -1)  # the four numbers of a counter
    for table in (quads, uniform.view(4, -1), normal.view(4, -1), normal.view(4, -1).square()):
        assert (torch.corrcoef(table) - torch.eye(4)).abs().max() < 4 / table.shape[1] ** 0.5


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
    for left_over in (1, 2, 3, 4):
        _compare(5, left_over, 9, 1.5)
    _compare(4, 6, 8, 1.0, torch.bfloat16)
    _keys_are_mixed_as_by_torch()
    _rows_of_noise_are_keyed_by_sample_and_position()
    _every_part_of_a_key_makes_another_stream()
    _rows_of_noise_have_their_law()
    _noise_is_normal_and_keyed()
    _noise_has_the_law_of_a_normal()
    _the_smallest_and_largest_uniforms_give_finite_normals()
    _sine_and_cosine_keep_their_bound()
    _the_logarithm_keeps_its_bound()
    _a_bad_sample_is_not_hidden()
    print("interpreted kernels agree with float64")
