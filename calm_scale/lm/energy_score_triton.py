"""The energy loss (Eq. 10) as one fused Triton kernel: a program walks the M posterior draws of a position.

Loss and gradient are made together. The posterior noise comes from Philox, keyed by the position and counted by
(draw, dimension): it lives in registers and is never stored. Distances are taken from differences, so nothing
cancels near zero. The numbers are independent of the layout, like those of the torch backend, but not the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from calm_scale.runtime.noise import PositionNoise

_MIN_SQUARED = tl.constexpr(1e-30)


@triton.jit
def _power(squared, alpha, IS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """d^α and α·d^(α−2) from d²; the second is finite at 0, where the difference it weighs is 0."""
    floored = tl.where(
        squared < _MIN_SQUARED, _MIN_SQUARED, squared
    )  # keeps NaN, which tl.maximum would hide
    if IS_ONE:
        root = tl.sqrt(floored)
        value = root
        weight = 1.0 / root
    else:
        value = tl.exp2(tl.log2(floored) * (alpha * 0.5))
        weight = alpha * value / floored
    return tl.where(squared == 0, 0.0, value), weight


@triton.jit
def _pull(y, point, live, alpha, IS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Σ_n ‖y_n − point‖^α over live rows and its gradient: y [N, l], point [l], live bool [N]."""
    difference = tl.where(live[:, None], y - point[None, :], 0.0)
    value, weight = _power(tl.sum(difference * difference, axis=1), alpha, IS_ONE)
    return value, weight[:, None] * difference


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

    fit = tl.zeros((BLOCK_N,), dtype=tl.float32)
    grad = tl.zeros((BLOCK_N, BLOCK_L), dtype=tl.float32)
    fit_factor = 2.0 / (num_samples * num_posterior)
    for quad in range(0, (num_posterior + 3) // 4):
        e0, e1, e2, e3 = tl.randn4x(key, quad * size + j)
        for q in tl.static_range(4):
            if q == 0:
                e = e0
            elif q == 1:
                e = e1
            elif q == 2:
                e = e2
            else:
                e = e3
            live = (n < num_samples) & (quad * 4 + q < num_posterior)
            value, slope = _pull(y, std * e, live, alpha, IS_ONE)
            fit += value
            if WANTS_GRAD:
                grad += slope
    grad = grad * fit_factor

    spread = tl.zeros((BLOCK_N,), dtype=tl.float32)
    pair_factor = 1.0 / (num_samples * (num_samples - 1))
    for k in range(0, num_samples):
        other = tl.load(first + k * size + j, mask=inside, other=0.0).to(tl.float32)
        value, slope = _pull(y, tl.where(inside, other - mean, 0.0), n < num_samples, alpha, IS_ONE)
        spread += value
        if WANTS_GRAD:
            grad -= 2.0 * pair_factor * slope
    tl.store(loss_ptr + row, fit_factor * tl.sum(fit, axis=0) - pair_factor * tl.sum(spread, axis=0))
    if WANTS_GRAD:
        tl.store(grad_ptr + row * num_samples * size + n[:, None] * size + j[None, :], grad, mask=grid)


@triton.jit
def _noise_kernel(keys_ptr, out_ptr, size, num_posterior, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_L)
    key = tl.load(keys_ptr + row)
    for quad in range(0, (num_posterior + 3) // 4):
        e0, e1, e2, e3 = tl.randn4x(key, quad * size + j)
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
    _noise_kernel[(keys.numel(),)](keys, out, size, num_posterior, BLOCK_L=triton.next_power_of_2(size))
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
        blocks = block_sizes(num_samples, size)
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
            **blocks,
        )
        ctx.grad = grad if wants_grad else None
        ctx.dtype = samples.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = upstream
        return (ctx.grad * scale[..., None, None]).to(ctx.dtype), None, None, None, None, None, None


def block_sizes(num_samples: int, size: int) -> dict[str, int]:
    """Tile of a program: the [N, l] samples of a position, padded to powers of two, about 32 numbers a thread."""
    block_n, block_l = triton.next_power_of_2(num_samples), triton.next_power_of_2(size)
    num_warps = min(8, max(1, block_n * block_l // 1024))
    return {"BLOCK_N": block_n, "BLOCK_L": block_l, "num_warps": num_warps}
