"""The energy loss (Eq. 10) as one fused Triton kernel: a program walks the M posterior draws of a position.

Loss and gradient are made together. The posterior noise comes from Philox, keyed by the position and counted by
(draw, dimension): it lives in registers and is never stored. Distances are taken from differences, so nothing
cancels near zero. The numbers are independent of the layout, like those of the torch backend, but not the same.

Rounding is fixed here and not by the compiler: where a product and a sum are rounded once, the source says
``tl.fma``, and the kernels are compiled with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from calm_scale.runtime.noise import PositionNoise
from calm_scale.runtime.noise_triton import NO_FUSION, log2, normal_quad

_MIN_SQUARED = tl.constexpr(1e-30)
_MAX_ELEMENTS = 8192
"""Padded N · l of a program. Above it the tile needs more than 8 warps, whose registers it then does not fit in."""
_MAX_SIZE = 2048
_MAX_COUNTER = 2**31


@triton.jit
def _power(squared, exponent, IS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """d^α and d^(α−2) from d², with exponent α/2 − 1; the second is finite at 0, and NaN stays NaN."""
    floored = tl.maximum(squared, _MIN_SQUARED, propagate_nan=tl.PropagateNan.ALL)
    if IS_ONE:
        weight = tl.rsqrt(floored)
    else:
        weight = tl.exp2(log2(floored) * exponent)
    return squared * weight, weight


@triton.jit
def _pull(  # type: ignore[no-untyped-def]
    y, std, e, fit, grad, exponent, IS_ONE: tl.constexpr, WANTS_GRAD: tl.constexpr
):
    """Adds ‖y_n − σε‖^α of one draw to fit [N], and its gradient in y over α to grad [N, l]."""
    difference = tl.fma(-std[None, :], e[None, :], y)
    value, weight = _power(tl.sum(difference * difference, axis=1), exponent, IS_ONE)
    if WANTS_GRAD:
        grad = tl.fma(weight[:, None], difference, grad)
    return fit + value, grad


@triton.jit
def _energy_kernel(  # type: ignore[no-untyped-def]
    samples_ptr,
    mean_ptr,
    log_std_ptr,
    keys_ptr,
    loss_ptr,
    grad_ptr,
    num_samples,
    size,
    num_posterior,
    alpha,
    IS_ONE: tl.constexpr,
    WANTS_GRAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_L)
    inside = j < size
    grid = (n < num_samples)[:, None] & inside[None, :]
    mean = tl.load(mean_ptr + row * size + j, mask=inside, other=0.0).to(tl.float32)
    log_std = tl.load(log_std_ptr + row * size + j, mask=inside, other=0.0).to(tl.float32)
    std = tl.where(inside, tl.exp(log_std), 0.0)
    first = samples_ptr + row * num_samples * size
    y = tl.load(first + n[:, None] * size + j[None, :], mask=grid, other=0.0).to(tl.float32)
    y = tl.where(grid, y - mean[None, :], 0.0)
    key = tl.load(keys_ptr + row)

    exponent = alpha * 0.5 - 1.0
    fit = tl.zeros((BLOCK_N,), dtype=tl.float32)
    grad = tl.zeros((BLOCK_N, BLOCK_L), dtype=tl.float32)
    # Padded columns differ by 0 and padded rows are dropped at the end: nothing is masked in the loop.
    full = num_posterior // 4
    for quad in range(0, full):
        e0, e1, e2, e3 = normal_quad(key, quad * size + j)
        for q in tl.range(0, 4, loop_unroll_factor=UNROLL):
            e = tl.where(q < 2, tl.where(q == 0, e0, e1), tl.where(q == 2, e2, e3))
            fit, grad = _pull(y, std, e, fit, grad, exponent, IS_ONE, WANTS_GRAD)
    for left in range(0, num_posterior - full * 4):
        e0, e1, e2, _ = normal_quad(key, full * size + j)
        e = tl.where(left == 0, e0, tl.where(left == 1, e1, e2))
        fit, grad = _pull(y, std, e, fit, grad, exponent, IS_ONE, WANTS_GRAD)
    fit_factor = 2.0 / (num_samples * num_posterior)
    grad = grad * (fit_factor * alpha)

    spread = tl.zeros((BLOCK_N,), dtype=tl.float32)
    pair_factor = 1.0 / (num_samples * (num_samples - 1))
    for k in range(0, num_samples):
        other = tl.load(first + k * size + j, mask=inside, other=0.0).to(tl.float32)
        difference = y - tl.where(inside, other - mean, 0.0)[None, :]
        value, weight = _power(tl.sum(difference * difference, axis=1), exponent, IS_ONE)
        spread += value
        if WANTS_GRAD:
            grad = tl.fma((weight * (-2.0 * pair_factor * alpha))[:, None], difference, grad)
    terms = tl.where(n < num_samples, fit_factor * fit - pair_factor * spread, 0.0)
    tl.store(loss_ptr + row, tl.sum(terms, axis=0))
    if WANTS_GRAD:
        tl.store(grad_ptr + row * num_samples * size + n[:, None] * size + j[None, :], grad, mask=grid)


@triton.jit
def _noise_kernel(keys_ptr, out_ptr, size, num_posterior, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_L)
    key = tl.load(keys_ptr + row)
    for quad in range(0, (num_posterior + 3) // 4):
        e0, e1, e2, e3 = normal_quad(key, quad * size + j)
        at = out_ptr + (row * num_posterior + quad * 4) * size + j
        draw = quad * 4 + tl.zeros_like(j)
        tl.store(at, e0, mask=j < size)
        tl.store(at + size, e1, mask=(j < size) & (draw + 1 < num_posterior))
        tl.store(at + 2 * size, e2, mask=(j < size) & (draw + 2 < num_posterior))
        tl.store(at + 3 * size, e3, mask=(j < size) & (draw + 3 < num_posterior))


def energy_score_triton(
    samples: torch.Tensor,
    mean: torch.Tensor,
    log_std: torch.Tensor,
    noise: PositionNoise,
    *,
    num_posterior: int,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Arguments and result as ``calm_scale.lm.energy_score.energy_score``; the arithmetic is fp32."""
    keys = noise.row_keys("posterior")
    wants_grad = torch.is_grad_enabled() and samples.requires_grad
    return cast(
        torch.Tensor,
        _FusedEnergyScore.apply(samples, mean, log_std, keys, num_posterior, alpha, wants_grad),
    )


def posterior_noise(noise: PositionNoise, num_posterior: int, size: int) -> torch.Tensor:
    """The ε [B, p, M, l] that the kernel makes for itself, written out: for tests and inspection only."""
    keys = noise.row_keys("posterior")
    out = torch.empty(*keys.shape, num_posterior, size, device=keys.device)
    block = triton.next_power_of_2(size)
    _noise_kernel[(keys.numel(),)](keys, out, size, num_posterior, BLOCK_L=block, **NO_FUSION)
    return out


class _FusedEnergyScore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        samples: torch.Tensor,
        mean: torch.Tensor,
        log_std: torch.Tensor,
        keys: torch.Tensor,
        num_posterior: int,
        alpha: float,
        wants_grad: bool,
    ) -> torch.Tensor:
        num_samples, size = samples.shape[-2:]
        loss = torch.empty(samples.shape[:-2], dtype=torch.float32, device=samples.device)
        grad = torch.empty(samples.shape if wants_grad else (1,), dtype=torch.float32, device=samples.device)
        _energy_kernel[(loss.numel(),)](
            samples.contiguous(),
            mean.contiguous(),
            log_std.contiguous(),
            keys.contiguous(),
            loss,
            grad,
            num_samples,
            size,
            num_posterior,
            alpha,
            IS_ONE=alpha == 1.0,
            WANTS_GRAD=wants_grad,
            **launch_options(num_samples, size),
        )
        ctx.grad = grad if wants_grad else None
        ctx.dtype = samples.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = upstream
        return (ctx.grad * scale[..., None, None]).to(ctx.dtype), None, None, None, None, None, None


def launch_options(num_samples: int, size: int) -> dict[str, int]:
    """Tile and compiler options of a program: the [N, l] samples of a position, padded to powers of two.

    A thread holds up to 32 numbers of the tile, of up to 8 columns. Full threads walk the four draws of a quad in a
    loop, since four copies of its body need more registers than there are, and get up to 208 registers: left alone,
    ptxas spills some values to fit one more program on a multiprocessor.
    """
    block_n, block_l = triton.next_power_of_2(num_samples), triton.next_power_of_2(size)
    tile = {
        "BLOCK_N": block_n,
        "BLOCK_L": block_l,
        "num_warps": max(1, block_n * block_l // 1024, block_l // 256),
    }
    full = block_n * block_l >= 1024
    return {**tile, **({"UNROLL": 1, "maxnreg": 208} if full else {"UNROLL": 4}), **NO_FUSION}


def why_unsupported(samples: torch.Tensor, num_posterior: int) -> str | None:
    """None where the kernel takes samples [B, p, N, l] with M draws; else why it does not."""
    num_samples, size = samples.shape[-2:]
    if samples.dtype == torch.float64:
        return "its arithmetic is fp32 and the samples are fp64"
    padded = triton.next_power_of_2(num_samples) * triton.next_power_of_2(size)
    if padded > _MAX_ELEMENTS:
        return (
            f"num_samples {num_samples} × latent size {size}, each padded to a power of two, is {padded} numbers "
            f"a position; it holds at most {_MAX_ELEMENTS}"
        )
    if size > _MAX_SIZE:
        return f"latent size {size}; it holds at most {_MAX_SIZE}"
    if num_posterior * size >= 4 * _MAX_COUNTER:
        return f"num_posterior {num_posterior} × latent size {size} is more noise than its 32-bit counter numbers"
    return None
