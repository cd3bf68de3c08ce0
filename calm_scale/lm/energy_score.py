"""The energy loss (Eq. 10), per position, without ever holding N·M·l numbers for all positions.

    (2/NM) Σ_n Σ_m ‖z_m − ẑ_n‖^α − 1/(N(N−1)) Σ_{n≠k} ‖ẑ_n − ẑ_k‖^α,    z_m ~ N(mean, diag std²)

Written around the posterior mean, z_m − ẑ_n = e_m − y_n with e = σ·ε and y = ẑ − mean, so the M·N distances of a
position are one small matrix product. Positions and posterior draws are walked in chunks and the gradient is made
in the same pass: memory does not grow with M.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from calm_scale.lm.heads.energy import DRAWS, rows_per_chunk
from calm_scale.runtime import fast_kernels
from calm_scale.runtime.noise import NoiseChunk, PositionNoise

Backend = Literal["auto", "torch", "triton"]
_NEAR = 0.05  # d² below this share of |e|² + |y|² is recomputed from the difference itself
_MIN_SQUARED = 1e-30  # floor under d² where it is raised to a negative power


def energy_score(
    samples: torch.Tensor,
    mean: torch.Tensor,
    log_std: torch.Tensor,
    noise: PositionNoise,
    *,
    num_posterior: int,
    alpha: float = 1.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Energy loss of each position; differentiable in ``samples`` only (the encoder is frozen).

    Args:
        samples: model samples ẑ [B, p, N, l]; N ≥ 2. Any float type; the arithmetic is fp32 (fp64 for fp64).
        mean, log_std: the posterior of the next patch, [B, p, l].
        noise: keyed noise of these B·p positions; its ``posterior/*`` streams are used.
        num_posterior: M. alpha: exponent, 0 < α ≤ 2; strictly proper below 2, blind to everything but the mean at 2.
        backend: ``auto`` takes Triton on CUDA, where it is there (not for fp64), and torch elsewhere. Their posterior
            draws differ.
            A shape that the Triton kernel does not take goes to torch; a warning says so once.

    Returns:
        [B, p], fp32 (fp64 for fp64 samples). Where two points coincide the gradient of their distance is 0.
    """
    _check(samples, mean, log_std, noise, num_posterior, alpha)
    fused = samples.is_cuda and samples.dtype != torch.float64 and fast_kernels.found().triton
    if backend == "triton" or (backend == "auto" and fused):
        from calm_scale.lm.energy_score_triton import energy_score_triton, why_unsupported

        if (why := why_unsupported(samples, num_posterior)) is None:
            return energy_score_triton(
                samples, mean, log_std, noise, num_posterior=num_posterior, alpha=alpha
            )
        _warn_of_torch(why)
    wants_grad = torch.is_grad_enabled() and samples.requires_grad
    return cast(
        torch.Tensor,
        _EnergyScore.apply(samples, mean, log_std, noise, num_posterior, alpha, wants_grad),
    )


@functools.cache
def _warn_of_torch(why: str) -> None:
    """Says once a process and reason that the fused kernel is not used."""
    logging.getLogger(__name__).warning(
        "The Triton energy loss does not take this shape (%s). The torch backend computes it: the same loss, slower, "
        "with other posterior draws",
        why,
    )


class _EnergyScore(torch.autograd.Function):
    """Computes the loss and its gradient together; backward only scales."""

    @staticmethod
    def forward(
        ctx: Any,
        samples: torch.Tensor,
        mean: torch.Tensor,
        log_std: torch.Tensor,
        noise: PositionNoise,
        num_posterior: int,
        alpha: float,
        wants_grad: bool,
    ) -> torch.Tensor:
        dtype = torch.float64 if samples.dtype == torch.float64 else torch.float32
        num_samples, size = samples.shape[-2:]
        flat = samples.reshape(-1, num_samples, size)
        mean, log_std = mean.reshape(-1, size), log_std.reshape(-1, size)
        loss = torch.empty(flat.shape[0], dtype=dtype, device=samples.device)
        grad = torch.empty(flat.shape, dtype=dtype, device=samples.device) if wants_grad else None
        pairs = _Pairs(num_samples, dtype, samples.device)
        for chunk in noise.chunks(rows_per_chunk(num_samples, num_posterior, size)):
            rows = chunk.rows
            y = flat[rows].to(dtype) - mean[rows].to(dtype)[:, None]
            std = log_std[rows].to(dtype).exp()
            value, slope = _to_posterior(y, std, chunk, num_posterior, alpha, wants_grad)
            pair_value, pair_slope = pairs.terms(y, alpha, wants_grad)
            loss[rows] = value - pair_value
            if grad is not None:
                torch.sub(slope, pair_slope, out=grad[rows])
        ctx.grad = grad
        ctx.dtype = samples.dtype
        return loss.view(samples.shape[:-2])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = upstream
        grad = ctx.grad.view(*scale.shape, *ctx.grad.shape[1:]) * scale[..., None, None]
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _to_posterior(
    y: torch.Tensor, std: torch.Tensor, chunk: NoiseChunk, num_posterior: int, alpha: float, wants_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(2/NM) Σ_n Σ_m ‖y_n − e_m‖^α [R] and its gradient in y [R, N, l] (zeros unless wanted)."""
    num_rows, num_samples, size = y.shape
    value = y.new_zeros(num_rows)
    slope = torch.zeros_like(y)
    y_squared = y.square().sum(-1)
    for first in range(0, num_posterior, DRAWS):
        count = min(DRAWS, num_posterior - first)
        e = chunk.normal(f"posterior/{first}", count, size).to(y.dtype).mul_(std[:, None])
        value += _to_draws(y, y_squared, e, alpha, slope if wants_grad else None)
        del e  # or two sets of draws would be alive at once
    factor = 2.0 / (num_samples * num_posterior)
    return value * factor, slope.mul_(factor)


def _to_draws(
    y: torch.Tensor, y_squared: torch.Tensor, e: torch.Tensor, alpha: float, slope: torch.Tensor | None
) -> torch.Tensor:
    """Σ_n Σ_m ‖y_n − e_m‖^α [R] for draws e [R, m, l]; its gradient in y is added to ``slope`` [R, N, l]."""
    num_samples, size = y.shape[1:]
    squared, near = squared_distances(y, e, y_squared)
    powers, weights = power(squared, alpha)
    if slope is not None:
        if near is not None:  # y·w − w·e would cancel there as well
            row, n, _ = near.pairs
            pulled = near.difference * weights[near.pairs][:, None]
            slope.view(-1, size).index_add_(0, row * num_samples + n, pulled)
            weights[near.pairs] = 0
        slope += y * weights.sum(-1, keepdim=True)
        slope.baddbmm_(weights, e, alpha=-1)
    return powers.sum((1, 2))


@dataclass(frozen=True)
class Near:
    """Pairs (row, n, m) so near each other that a sum of squares and products would cancel, and y_n − e_m of each."""

    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    difference: torch.Tensor


def squared_distances(
    y: torch.Tensor, e: torch.Tensor, y_squared: torch.Tensor, *, same: bool = False
) -> tuple[torch.Tensor, Near | None]:
    """‖y_n − e_m‖² [R, N, m] of y [R, N, l], whose squares are [R, N], and e [R, m, l]; with the pairs near each other.

    ``same``: e is y, and a point is not counted near itself.
    """
    of_e = y_squared if same else torch.linalg.vector_norm(e, dim=-1).square_()
    total = y_squared[:, :, None] + of_e[:, None, :]
    squared = torch.baddbmm(total, y, e.transpose(1, 2), alpha=-2)
    close = squared < total.mul_(_NEAR)
    if same:
        close.diagonal(dim1=1, dim2=2).fill_(False)
    if not bool(close.any()):
        return squared, None
    row, n, m = close.nonzero(as_tuple=True)
    difference = y[row, n] - e[row, m]
    squared[row, n, m] = difference.square().sum(-1)
    return squared, Near((row, n, m), difference)


class _Pairs:
    """The N(N−1)/2 pairs of model samples as an incidence matrix of ±1: differences and gradients are products."""

    def __init__(self, num_samples: int, dtype: torch.dtype, device: torch.device) -> None:
        first, second = torch.triu_indices(num_samples, num_samples, offset=1, device=device)
        self.incidence = torch.zeros(len(first), num_samples, dtype=dtype, device=device)
        index = torch.arange(len(first), device=device)
        self.incidence[index, first] = 1
        self.incidence[index, second] = -1
        self.factor = 2.0 / (num_samples * (num_samples - 1))

    def terms(self, y: torch.Tensor, alpha: float, wants_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """1/(N(N−1)) Σ_{n≠k} ‖y_n − y_k‖^α [R] and its gradient in y [R, N, l]."""
        difference = torch.matmul(self.incidence, y)
        powers, weights = power(torch.linalg.vector_norm(difference, dim=-1).square_(), alpha)
        value = powers.sum(-1) * self.factor
        if not wants_grad:
            return value, y
        weighted = difference.mul_(weights.mul_(self.factor)[..., None])
        return value, torch.matmul(self.incidence.t(), weighted)


def power(squared: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """d^α and α·d^(α−2) from d²; the second is the weight of the gradient, 0 at coincident points."""
    squared = squared.clamp_min_(0)
    floored = squared.clamp_min(_MIN_SQUARED)
    if alpha == 1.0:
        return squared.sqrt(), floored.rsqrt_()
    return squared.pow(alpha / 2), floored.pow_(alpha / 2 - 1).mul_(alpha)


def _check(
    samples: torch.Tensor,
    mean: torch.Tensor,
    log_std: torch.Tensor,
    noise: PositionNoise,
    num_posterior: int,
    alpha: float,
) -> None:
    if not 0 < alpha <= 2:
        raise ValueError(f"alpha {alpha} is outside 0 < alpha <= 2, where the energy score is proper")
    if num_posterior < 1:
        raise ValueError(f"num_posterior must be at least 1, got {num_posterior}")
    if samples.dim() != 4 or samples.shape[2] < 2:
        raise ValueError(f"samples must be [B, p, N, l] with N >= 2, got {tuple(samples.shape)}")
    want = (samples.shape[0], samples.shape[1], samples.shape[3])
    if tuple(mean.shape) != want or tuple(log_std.shape) != want:
        raise ValueError(f"mean {tuple(mean.shape)} and log_std {tuple(log_std.shape)} must both be {want}")
    if noise.shape != want[:2]:
        raise ValueError(f"noise is keyed for positions {noise.shape}, samples have {want[:2]}")
