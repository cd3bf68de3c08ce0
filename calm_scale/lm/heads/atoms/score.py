"""The energy score of a law on C weighted atoms, exact: nothing is drawn from the model.

    2 Σ_c w_c mean_m ‖z_m − a_c‖^α − Σ_{c,d} w_c w_d ‖a_c − a_d‖^α
        − λ mean_m log Σ_c w_c exp(−‖z_m − a_c‖² / 2σ²),    z_m ~ N(mean, diag std²)

The log score is that of the mixture of Gaussians around the atoms, without its constant. Positions are walked in
chunks and the gradient is made in the same pass: no pair of all positions is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from calm_scale.lm.energy_score import Near, power, squared_distances
from calm_scale.lm.heads.atoms import rows_per_chunk
from calm_scale.runtime.noise import PositionNoise


@dataclass(frozen=True)
class AtomScore:
    """M draws of the posterior, α, and the log score's weight λ and scale σ."""

    num_posterior: int
    alpha: float = 1.0
    log_weight: float = 0.0
    log_scale: float = 0.7

    def __call__(
        self,
        atoms: torch.Tensor,
        logits: torch.Tensor,
        mean: torch.Tensor,
        log_std: torch.Tensor,
        noise: PositionNoise,
    ) -> torch.Tensor:
        """Loss of each position; differentiable in atoms and logits (the encoder is frozen).

        Args:
            atoms: [B, p, C, l]. logits: [B, p, C]; w is their softmax. Arithmetic is fp32 (fp64 for fp64 atoms).
            mean, log_std: the posterior of the next patch, [B, p, l].
            noise: keyed noise of these B·p positions.

        Returns:
            [B, p], fp32 or fp64. Where two points coincide the gradient of their distance is 0.
        """
        wants_grad = torch.is_grad_enabled() and (atoms.requires_grad or logits.requires_grad)
        return cast(torch.Tensor, _Scored.apply(atoms, logits, mean, log_std, noise, self, wants_grad))


class _Scored(torch.autograd.Function):
    """Computes the loss and its gradients together; backward only scales."""

    @staticmethod
    def forward(
        ctx: Any,
        atoms: torch.Tensor,
        logits: torch.Tensor,
        mean: torch.Tensor,
        log_std: torch.Tensor,
        noise: PositionNoise,
        score: AtomScore,
        wants_grad: bool,
    ) -> torch.Tensor:
        dtype = torch.float64 if atoms.dtype == torch.float64 else torch.float32
        count, size = atoms.shape[-2:]
        flat, scores = atoms.reshape(-1, count, size), logits.reshape(-1, count)
        mean, log_std = mean.reshape(-1, size), log_std.reshape(-1, size)
        loss = torch.empty(len(flat), dtype=dtype, device=atoms.device)
        grads = (torch.empty_like(flat), torch.empty_like(scores)) if wants_grad else None
        for chunk in noise.chunks(rows_per_chunk(count, score.num_posterior, size)):
            rows = chunk.rows
            y = flat[rows].to(dtype) - mean[rows].to(dtype)[:, None]
            e = chunk.normal("posterior/0", score.num_posterior, size).to(dtype)
            e *= log_std[rows].to(dtype).exp()[:, None]
            log_law = torch.log_softmax(scores[rows].to(dtype), dim=-1)
            loss[rows], *found = _score_rows(y, log_law, e, score, wants_grad)
            if grads is not None:
                for grad, part in zip(grads, found, strict=True):
                    grad[rows] = part
        ctx.grads, ctx.shapes = grads, (atoms.shape, logits.shape)
        return loss.view(atoms.shape[:-2])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_atoms, of_logits = (grad.view(shape) for grad, shape in zip(ctx.grads, ctx.shapes, strict=True))
        scale = upstream[0][..., None]
        scaled = (of_atoms * scale[..., None]).to(of_atoms.dtype), (of_logits * scale).to(of_logits.dtype)
        return *scaled, None, None, None, None, None


def _score_rows(
    y: torch.Tensor, log_law: torch.Tensor, e: torch.Tensor, score: AtomScore, wants_grad: bool
) -> list[torch.Tensor]:
    """Loss [R] of atoms y [R, C, l] and targets e [R, M, l]; with gradient also that of y and of the logits [R, C]."""
    law, y_squared = log_law.exp(), y.square().sum(-1)
    squared, near = squared_distances(y, e, y_squared)
    likelihood = log_law[..., None] - squared / (2 * score.log_scale**2) if score.log_weight else None
    powers, slopes = power(squared, score.alpha)
    centred = y - y.mean(1, keepdim=True)  # of the atoms themselves: fewer pairs whose squares would cancel
    between, between_slopes, between_near = _between(centred, score.alpha)
    to_targets, to_atoms = powers.mean(-1), torch.matmul(between, law[..., None])[..., 0]
    per_weight = 2 * (to_targets - to_atoms)
    value = (law * (2 * to_targets - to_atoms)).sum(-1)
    pull = slopes * (law * (2 / score.num_posterior))[..., None] if wants_grad else slopes
    of_logits = law * (per_weight - (law * per_weight).sum(-1, keepdim=True))
    if likelihood is not None:
        total = torch.logsumexp(likelihood, dim=1, keepdim=True)
        value -= score.log_weight * total[:, 0].mean(-1)
        share = likelihood.sub_(total).exp_()  # of each atom in each target
        of_logits += score.log_weight * (law - share.mean(-1))
        pull += share * (score.log_weight / score.num_posterior / score.log_scale**2)
    if not wants_grad:
        return [value]
    apart = _pushed(centred, law, between_slopes, between_near).mul_(2 * law[..., None])
    return [value, _pulled(y, e, pull, near).sub_(apart), of_logits]


def _between(y: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor, Near | None]:
    """‖y_c − y_d‖^α, the weights of its gradient (both [R, C, C]), and the pairs near each other."""
    squared, near = squared_distances(y, y, y.square().sum(-1), same=True)
    powers, slopes = power(squared, alpha)
    for one in (powers, slopes):
        one.diagonal(dim1=1, dim2=2).zero_()
    return powers, slopes, near


def _pulled(y: torch.Tensor, e: torch.Tensor, weights: torch.Tensor, near: Near | None) -> torch.Tensor:
    """Σ_m weights_cm (y_c − e_m) [R, C, l]; pairs near each other by their differences, where the rest would cancel."""
    found = _by_differences(y, weights, near)
    found += y * weights.sum(-1, keepdim=True)
    return torch.baddbmm(found, weights, e, alpha=-1)


def _pushed(y: torch.Tensor, law: torch.Tensor, weights: torch.Tensor, near: Near | None) -> torch.Tensor:
    """Σ_d weights_cd w_d (y_c − y_d) [R, C, l], without the matrix of weights_cd w_d."""
    found = 0 if near is None else _by_differences(y, weights, near, law)
    sums = torch.bmm(weights, torch.cat([y * law[..., None], law[..., None]], dim=-1))
    return y * sums[..., -1:] - sums[..., :-1] + found


def _by_differences(
    y: torch.Tensor, weights: torch.Tensor, near: Near | None, law: torch.Tensor | None = None
) -> torch.Tensor:
    """The part of the pairs near each other [R, C, l], whose weights are then 0."""
    found = torch.zeros_like(y)
    if near is not None:
        row, first, second = near.pairs
        weight = weights[near.pairs] if law is None else weights[near.pairs] * law[row, second]
        found.view(-1, y.shape[-1]).index_add_(0, row * y.shape[1] + first, near.difference * weight[:, None])
        weights[near.pairs] = 0
    return found
