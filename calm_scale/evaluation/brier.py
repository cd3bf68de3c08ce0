"""Brier-n and BrierLM from samples alone: tensors in, numbers out.

For S independent samples x_1..x_S of the n tokens after a true prefix, and the truth y,

    Brier-n = (2/S) Σ_s 1{x_s = y} − (2/(S(S−1))) Σ_{s<t} 1{x_s = x_t}

is unbiased for 2P(y) − Σ_x P(x)²; S = 2 is the paper's two-sample form. Everything is counted in integers
and divided once at the end, so a score does not depend on how the positions were split over batches or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calm_scale.config.errors import CalmScaleError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

ORDERS = 4
_WEIGHT_ELEMENTS = 1 << 22  # document weights alive in a bootstrap


class EvaluationError(CalmScaleError):
    """An evaluation that cannot be carried out, or samples that do not fit the truth."""


@dataclass(frozen=True)
class Counts:
    """Integer sums per document, ``int64 [D, 4]``: the sufficient statistics of every score below.

    ``hits`` counts samples equal to the truth, ``pairs`` unordered pairs of equal samples, ``positions`` the
    positions that have n true tokens after them; column n−1 belongs to order n.
    ``ids [D]``, ascending, are the documents' places among all of the scored sequences, which do not depend on the
    model; None where the sums came without.
    """

    hits: NDArray[np.int64]
    pairs: NDArray[np.int64]
    positions: NDArray[np.int64]
    num_samples: int
    ids: NDArray[np.int64] | None = None

    @property
    def num_documents(self) -> int:
        """D."""
        return int(self.hits.shape[0])

    def rows(self, chosen: NDArray[np.int64]) -> Counts:
        """Those documents only."""
        ids = None if self.ids is None else self.ids[chosen]
        return Counts(self.hits[chosen], self.pairs[chosen], self.positions[chosen], self.num_samples, ids)

    def total(self) -> Counts:
        """All documents as one."""
        hits, pairs, positions = (
            a.sum(axis=0, keepdims=True) for a in (self.hits, self.pairs, self.positions)
        )
        return Counts(hits, pairs, positions, self.num_samples)

    def numerators(self) -> NDArray[np.int64]:
        """Integers [D, 4] whose sum over S(S−1)·positions is Brier-n."""
        return 2 * (self.num_samples - 1) * self.hits - 2 * self.pairs


@dataclass(frozen=True)
class BrierScore:
    """Components as fractions (not per cent), BrierLM on the paper's scale of 100; None means undefined."""

    components: tuple[float | None, ...]
    component_intervals: tuple[tuple[float, float] | None, ...]
    brierlm: float | None
    brierlm_interval: tuple[float | None, float | None] | None
    undefined_because: str | None
    accuracy: tuple[float | None, ...]
    collision: tuple[float | None, ...]
    num_positions: tuple[int, ...]
    num_documents: int
    num_samples: int
    confidence: float
    bootstrap: int


def match_counts(
    samples: Tensor, truth: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hits, equal pairs and scored positions for the prefixes of length 1..min(4, K).

    Args:
        samples: ids ``[S, B, P, K]``, S ≥ 2 independent samples of the K tokens that follow each prefix.
        truth: ids ``[B, P, K]``.
        valid: bool ``[B, P, K]``; a position counts for order n where its first n entries are all true.

    Returns:
        int64 ``[W, B, P]`` each, W = min(4, K): samples equal to the truth, unordered pairs of equal samples
        (both zero where the position does not count), and 1 where the position counts.

    Raises:
        EvaluationError: fewer than two samples, or shapes that do not belong together.
    """
    if samples.dim() != 4 or samples.shape[1:] != truth.shape:
        raise EvaluationError(
            f"samples must be [S, B, P, K] over truth [B, P, K]; got {list(samples.shape)} and {list(truth.shape)}"
        )
    if valid is not None and valid.shape != truth.shape:
        raise EvaluationError(
            f"valid must be [B, P, K] like the truth; got {list(valid.shape)} and {list(truth.shape)}"
        )
    num_samples = samples.shape[0]
    if num_samples < 2:
        raise EvaluationError(f"Brier needs at least 2 independent samples a position, got {num_samples}")
    width = min(ORDERS, truth.shape[-1])
    samples, truth = samples[..., :width], truth[..., :width]
    counted = torch.ones_like(truth, dtype=torch.bool) if valid is None else valid[..., :width]
    counted = counted.cumprod(-1).long()
    hits = (samples == truth).cumprod(-1).sum(0)
    pairs = torch.zeros_like(hits)
    for s in range(num_samples - 1):
        pairs += (samples[s] == samples[s + 1 :]).cumprod(-1).sum(0)
    hits, pairs = hits * counted, pairs * counted
    return hits.movedim(-1, 0), pairs.movedim(-1, 0), counted.movedim(-1, 0)


def counts_by_document(
    samples: Tensor, truth: Tensor, documents: Tensor | None = None, valid: Tensor | None = None
) -> Counts:
    """``match_counts`` summed over the positions of each document.

    Args:
        samples, truth, valid: as in ``match_counts``.
        documents: int64 ``[B, P]`` ids 0..D−1; without it each of the B sequences is a document.

    Raises:
        EvaluationError: as ``match_counts``, or documents of another shape or with negative ids.
    """
    hits, pairs, counted = match_counts(samples, truth, valid)
    width, batch, num_positions = hits.shape
    if documents is None:
        documents = torch.arange(batch, device=truth.device)[:, None].expand(batch, num_positions)
    if documents.shape != (batch, num_positions) or documents.is_floating_point():
        raise EvaluationError(
            f"documents must be whole ids [B, P] = {[batch, num_positions]}, one a position; got "
            f"{list(documents.shape)} of {documents.dtype}"
        )
    if documents.numel() and int(documents.min()) < 0:
        raise EvaluationError(f"documents must be ids from 0 on; got {int(documents.min())}")
    flat = documents.reshape(-1).to(hits.device)
    num_documents = int(flat.max()) + 1 if flat.numel() else 0

    def summed(values: Tensor) -> NDArray[np.int64]:
        out = torch.zeros(num_documents, ORDERS, dtype=torch.int64, device=hits.device)
        out[:, :width].index_add_(0, flat, values.reshape(width, -1).T.contiguous())
        return out.cpu().numpy()

    return Counts(summed(hits), summed(pairs), summed(counted), samples.shape[0])


def score(counts: Counts, bootstrap: int = 1000, confidence: float = 0.95, seed: int = 0) -> BrierScore:
    """Components, composite and their percentile intervals from a bootstrap over documents.

    The components average over all positions first; the geometric mean comes last. BrierLM is None unless all
    four components are positive; an interval end is None where that quantile of the resampled composites is
    undefined. Fewer than two documents give no interval.

    Raises:
        EvaluationError: a confidence that is no share, or less than one resampling.
    """
    check_bootstrap(bootstrap, confidence)
    total = counts.total()
    components = component_values(total)[0]
    composite = composite_of(components[None])[0]
    component_intervals: list[tuple[float, float] | None] = [None] * ORDERS
    brierlm_interval = None
    if counts.num_documents >= 2:
        (resampled,) = resample([counts], bootstrap, seed)
        component_intervals = [_interval(resampled[:, n], confidence) for n in range(ORDERS)]
        if not np.isnan(composite):
            brierlm_interval = _composite_interval(composite_of(resampled), confidence)
    size = np.maximum(total.positions[0], 1)
    scored = total.positions[0] > 0
    s = counts.num_samples
    return BrierScore(
        components=_numbers(components, scored),
        component_intervals=tuple(component_intervals),
        brierlm=None if np.isnan(composite) else float(composite),
        brierlm_interval=brierlm_interval,
        undefined_because=_why_undefined(components),
        accuracy=_numbers(total.hits[0] / (s * size), scored),
        collision=_numbers(total.pairs[0] / (s * (s - 1) // 2 * size), scored),
        num_positions=tuple(int(p) for p in total.positions[0]),
        num_documents=counts.num_documents,
        num_samples=s,
        confidence=confidence,
        bootstrap=bootstrap,
    )


def check_bootstrap(bootstrap: int, confidence: float) -> None:
    """Raises EvaluationError where no percentile interval can be made so."""
    if not 0 < confidence < 1:
        raise EvaluationError(f"confidence must lie between 0 and 1, both excluded; got {confidence}")
    if bootstrap < 1:
        raise EvaluationError(f"bootstrap must be at least 1 resampling; got {bootstrap}")


def brier(
    samples: Tensor,
    truth: Tensor,
    documents: Tensor | None = None,
    valid: Tensor | None = None,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> BrierScore:
    """BrierLM of any model's samples ``[S, B, P, K]`` against ``truth [B, P, K]``; see ``match_counts``, ``score``."""
    return score(counts_by_document(samples, truth, documents, valid), bootstrap, confidence, seed)


def component_values(counts: Counts) -> NDArray[np.float64]:
    """Brier-1..4 of each row of sums, float64 [D, 4]; NaN where a row has no position of that order."""
    scale = counts.num_samples * (counts.num_samples - 1) * counts.positions
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale > 0, counts.numerators() / scale, np.nan)


def composite_of(components: NDArray[np.float64]) -> NDArray[np.float64]:
    """100 · geometric mean of rows [R, 4]; NaN (undefined) unless all four are positive."""
    positive = (components > 0).all(axis=1)
    out = np.full(len(components), np.nan)
    out[positive] = 100.0 * np.exp(np.log(components[positive]).mean(axis=1))
    return out


def resample(several: Sequence[Counts], bootstrap: int, seed: int) -> list[NDArray[np.float64]]:
    """Brier-1..4 of resampled sets of documents, float64 [bootstrap, 4] for each of the given scores.

    All of them must count the same D documents; they are resampled together. The draws depend on the seed alone.
    """
    num_documents = several[0].num_documents
    rng = np.random.Generator(np.random.PCG64(seed))
    out = [np.empty((bootstrap, ORDERS)) for _ in several]
    size = max(1, _WEIGHT_ELEMENTS // max(1, num_documents))
    for begin in range(0, bootstrap, size):
        rows = range(begin, min(begin + size, bootstrap))
        drawn = (rng.integers(num_documents, size=num_documents) for _ in rows)
        weights = np.stack([np.bincount(d, minlength=num_documents) for d in drawn])
        for values, c in zip(out, several, strict=True):
            sums = (weights @ c.hits, weights @ c.pairs, weights @ c.positions)
            values[rows.start : rows.stop] = component_values(Counts(*sums, num_samples=c.num_samples))
    return out


def _interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float] | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _composite_interval(values: NDArray[np.float64], confidence: float) -> tuple[float | None, float | None]:
    # An undefined resampling is worse than any defined one, so it belongs to the low end.
    ordered = np.sort(np.where(np.isnan(values), -np.inf, values))
    last = len(ordered) - 1
    ends = (ordered[round(q * last)] for q in ((1 - confidence) / 2, (1 + confidence) / 2))
    low, high = (None if np.isinf(e) else float(e) for e in ends)
    return low, high


def _numbers(values: NDArray[np.float64], present: NDArray[np.bool_]) -> tuple[float | None, ...]:
    return tuple(float(v) if ok else None for v, ok in zip(values, present, strict=True))


def _why_undefined(components: NDArray[np.float64]) -> str | None:
    unscored = [f"Brier-{n}" for n, v in enumerate(components, 1) if np.isnan(v)]
    negative = [f"Brier-{n}" for n, v in enumerate(components, 1) if v <= 0]
    if unscored:
        return f"no position has a score for {', '.join(unscored)}"
    return f"not positive: {', '.join(negative)}" if negative else None
