"""Two evaluations of the same documents, compared pair by pair.

Both scores are resampled with the same documents, so what the documents have in common (hard and easy ones)
cancels in the difference and a small true gain shows with far fewer documents than two separate intervals need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calm_scale.config.errors import ConfigError
from calm_scale.config.quantities import counted
from calm_scale.evaluation.brier import (
    ORDERS,
    Counts,
    EvaluationError,
    check_bootstrap,
    component_values,
    composite_of,
    resample,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.table import Table

    from calm_scale.evaluation.evaluate import EvaluationResult

_SAME_SEQUENCES = (
    "block_tokens",
    "num_sequences",
    "sequences_left_out",
    "partial_sequences",
    "documents_by",
)
_WORTH_SAYING = ("patch_size", "coverage", "num_samples", "sampler", "seed", "vocab_size")


class NotComparableError(EvaluationError, ConfigError):
    """Two evaluations whose documents do not pair."""


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
    """Differences of Brier-1..4 and BrierLM, and how the two protocols differ (which is then part of the answer).

    ``num_documents`` are those scored in both; ``left_out`` those scored in a only and in b only.
    """

    differences: tuple[Difference, ...]
    num_documents: int
    left_out: tuple[int, int]
    protocol_differences: tuple[str, ...]
    confidence: float


def compare(
    a: EvaluationResult, b: EvaluationResult, bootstrap: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """b against a over the documents that both scored, paired by document.

    A document without a scored position in one of them (too short for its patches) is left out of both.

    Raises:
        NotComparableError: they did not score the same sequences, or fewer than 2 documents pair.
        EvaluationError: a confidence that is no share, or less than one resampling.
    """
    check_bootstrap(bootstrap, confidence)
    _same_sequences(a, b)
    pairs = _paired(a.counts, b.counts)
    num_documents = pairs[0].num_documents
    out = []
    columns = []
    for counts, spread in zip(pairs, resample(pairs, bootstrap, seed), strict=True):
        totals = component_values(counts.total())
        columns.append(
            (np.append(totals[0], composite_of(totals)), np.column_stack([spread, composite_of(spread)]))
        )
    (score_a, spread_a), (score_b, spread_b) = columns
    for i in range(ORDERS + 1):
        name = "BrierLM" if i == ORDERS else f"Brier-{i + 1}"
        out.append(_difference(name, score_a[i], score_b[i], spread_b[:, i] - spread_a[:, i], confidence))
    left_out = (a.counts.num_documents - num_documents, b.counts.num_documents - num_documents)
    return Comparison(tuple(out), num_documents, left_out, _protocol_differences(a, b), confidence)


def table(comparison: Comparison) -> Table:
    """For the terminal; components in per cent."""
    from rich.table import Table

    out = Table(
        title=f"b − a over {counted(comparison.num_documents, 'document')}",
        caption="\n".join([*comparison.protocol_differences, *_left_out(comparison)]) or "same protocol",
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


def _left_out(comparison: Comparison) -> list[str]:
    return [
        f"left out: {counted(number, 'document')} scored in {name} only"
        for name, number in zip("ab", comparison.left_out, strict=True)
        if number
    ]


def _same_sequences(a: EvaluationResult, b: EvaluationResult) -> None:
    data = [r.protocol.get("provenance", {}).get("data") for r in (a, b)]
    if data[0] != data[1]:
        raise NotComparableError(f"the two evaluations read different data: {data[0]} and {data[1]}")
    other = [
        f"{name}: {a.protocol.get(name)} and {b.protocol.get(name)}"
        for name in _SAME_SEQUENCES
        if a.protocol.get(name) != b.protocol.get(name)
    ]
    if other:
        raise NotComparableError(
            f"the two evaluations scored different sequences ({', '.join(other)}); score the same ones with both "
            "models: lm.backbone.positions × patch_size and evaluation.max_sequences must agree"
        )


def _paired(a: Counts, b: Counts) -> list[Counts]:
    """The documents that both have, in the same order."""
    if a.ids is None or b.ids is None:
        name = "first" if a.ids is None else "second"
        raise NotComparableError(
            f"the {name} evaluation does not say which documents it scored: an earlier version wrote it; run "
            "`calm-scale eval` again"
        )
    common, in_a, in_b = np.intersect1d(a.ids, b.ids, assume_unique=True, return_indices=True)
    if len(common) < 2:
        raise NotComparableError(
            f"a paired comparison needs at least 2 documents scored by both, there is {len(common)}"
        )
    return [a.rows(in_a), b.rows(in_b)]


def _protocol_differences(a: EvaluationResult, b: EvaluationResult) -> tuple[str, ...]:
    steps = [r.protocol.get("provenance", {}).get("sampling_steps") for r in (a, b)]
    values = {key: (a.protocol.get(key), b.protocol.get(key)) for key in _WORTH_SAYING}
    values["sampling_steps"] = (steps[0], steps[1])
    return tuple(f"{key}: a {x}, b {y}" for key, (x, y) in values.items() if x != y)
