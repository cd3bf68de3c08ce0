"""Two evaluations of the same documents, compared pair by pair.

Both scores are resampled with the same documents, so what the documents have in common (hard and easy ones)
cancels in the difference and a small true gain shows with far fewer documents than two separate intervals need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calm_scale.config.wording import counted
from calm_scale.evaluation.brier import (
    ORDERS,
    EvaluationError,
    component_values,
    composite_of,
    resample,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.table import Table

    from calm_scale.evaluation.evaluate import EvaluationResult

_SAME_DATA = ("documents_by", "num_sequences", "block_tokens")
_WORTH_SAYING = ("patch_size", "coverage", "num_samples", "sampler", "seed", "vocab_size", "block_tokens")


@dataclass(frozen=True)
class Difference:
    """b − a of one score, its interval, and the share of resamplings in which b is above a."""

    name: str
    a: float | None
    b: float | None
    difference: float | None
    interval: tuple[float, float] | None
    share_above: float | None


@dataclass(frozen=True)
class Comparison:
    """Differences of Brier-1..4 and BrierLM, and how the two protocols differ (which is then part of the answer)."""

    differences: tuple[Difference, ...]
    num_documents: int
    protocol_differences: tuple[str, ...]
    confidence: float


def compare(
    a: EvaluationResult, b: EvaluationResult, bootstrap: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """b against a, paired by document.

    Raises:
        EvaluationError: they did not score the same documents.
    """
    _same_documents(a, b)
    out = []
    columns = []
    for result, spread in zip((a, b), resample([a.counts, b.counts], bootstrap, seed), strict=True):
        totals = component_values(result.counts.total())
        columns.append(
            (np.append(totals[0], composite_of(totals)), np.column_stack([spread, composite_of(spread)]))
        )
    (score_a, spread_a), (score_b, spread_b) = columns
    for i in range(ORDERS + 1):
        name = "BrierLM" if i == ORDERS else f"Brier-{i + 1}"
        out.append(_difference(name, score_a[i], score_b[i], spread_b[:, i] - spread_a[:, i], confidence))
    return Comparison(tuple(out), a.counts.num_documents, _protocol_differences(a, b), confidence)


def table(comparison: Comparison) -> Table:
    """For the terminal; components in per cent."""
    from rich.table import Table

    out = Table(
        title=f"b − a over {counted(comparison.num_documents, 'document')}",
        caption="\n".join(comparison.protocol_differences) or "same protocol",
        caption_justify="left",
    )
    for name in ("", "a", "b", "b − a", f"{comparison.confidence:.0%} interval", "b above a"):
        out.add_column(name, justify="left" if not name else "right")
    for d in comparison.differences:
        scale = 1.0 if d.name == "BrierLM" else 100.0
        numbers = ["n/a" if x is None else f"{scale * x:z.3f}" for x in (d.a, d.b, d.difference)]
        interval = "n/a" if d.interval is None else " – ".join(f"{scale * x:+z.3f}" for x in d.interval)
        share = "n/a" if d.share_above is None else f"{d.share_above:.1%}"
        out.add_row(d.name if d.name == "BrierLM" else f"{d.name} (%)", *numbers, interval, share)
    return out


def _difference(name: str, a: float, b: float, spread: NDArray[np.float64], confidence: float) -> Difference:
    defined = spread[~np.isnan(spread)]
    interval = share = None
    # With undefined composites among the resamplings an interval would describe the lucky ones only.
    if len(defined) == len(spread) and len(spread) and not np.isnan(b - a):
        low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
        interval, share = (float(low), float(high)), float((defined > 0).mean())
    shown_a, shown_b, shown = (None if np.isnan(x) else float(x) for x in (a, b, b - a))
    return Difference(name, shown_a, shown_b, shown, interval, share)


def _same_documents(a: EvaluationResult, b: EvaluationResult) -> None:
    if a.counts.num_documents < 2:
        raise EvaluationError(
            f"a paired comparison needs at least 2 documents, there is {a.counts.num_documents}"
        )
    data = [r.protocol.get("provenance", {}).get("data") for r in (a, b)]
    if data[0] != data[1]:
        raise EvaluationError(f"the two evaluations read different data: {data[0]} and {data[1]}")
    if a.counts.num_documents != b.counts.num_documents:
        reasons = ", ".join(f"{k}: {a.protocol.get(k)} and {b.protocol.get(k)}" for k in _SAME_DATA)
        raise EvaluationError(
            f"the two evaluations scored {a.counts.num_documents} and {b.counts.num_documents} documents "
            f"({reasons}); score the same sequences with both models"
        )


def _protocol_differences(a: EvaluationResult, b: EvaluationResult) -> tuple[str, ...]:
    return tuple(
        f"{key}: a {a.protocol.get(key)}, b {b.protocol.get(key)}"
        for key in _WORTH_SAYING
        if a.protocol.get(key) != b.protocol.get(key)
    )
