"""Accuracy against collision (Figs. 10–11) and BrierLM against cross-entropy (Fig. 3): numbers and pictures.

Accuracy is the chance that a sample equals the true n-gram, collision the chance that two samples are equal; both
as geometric means over n = 1..4, in per cent. A sharper law moves right (less diverse) and, as far as it is right,
up. Two samplers with the same trajectory behave alike in this sense; their laws may still differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm_scale.evaluation.brier import EvaluationError
from calm_scale.evaluation.evaluate import EvaluationResult, evaluate

if TYPE_CHECKING:
    from calm_scale.config.evaluation import EvaluationConfig
    from calm_scale.evaluation.sequences import TokenBlocks
    from calm_scale.lm.patch_model import PatchModel


@dataclass(frozen=True)
class CurvePoint:
    """One sampler's place, in per cent; 0 where some order was never hit."""

    label: str
    accuracy: float
    collision: float
    brierlm: float | None


def point_of(label: str, result: EvaluationResult) -> CurvePoint:
    """Geometric means over the four orders."""
    return CurvePoint(
        label, _mean(result.score.accuracy), _mean(result.score.collision), result.score.brierlm
    )


def trace(
    models: Iterable[tuple[str, PatchModel]],
    dataset: TokenBlocks,
    config: EvaluationConfig,
    on_point: Callable[[CurvePoint], None] | None = None,
    **arguments: Any,
) -> list[CurvePoint]:
    """Evaluates each labelled model (one law at several temperatures, say); ``arguments`` go to ``evaluate``."""
    points = []
    for label, model in models:
        points.append(point_of(label, evaluate(model, dataset, config, **arguments)))
        if on_point is not None:
            on_point(points[-1])
    return points


@dataclass(frozen=True)
class Correlation:
    """Of cross-entropy and BrierLM over checkpoints; the paper's are −0.966 and −0.991."""

    pearson: float
    spearman: float
    num_points: int


def correlate(cross_entropy: Sequence[float], brierlm: Sequence[float | None]) -> Correlation:
    """Checkpoints whose BrierLM is undefined are left out.

    Raises:
        EvaluationError: fewer than three checkpoints are left.
    """
    pairs = [(c, b) for c, b in zip(cross_entropy, brierlm, strict=True) if b is not None]
    if len(pairs) < 3:
        raise EvaluationError(
            f"a correlation needs at least 3 checkpoints with a defined BrierLM, there are {len(pairs)}"
        )
    c, b = np.array(pairs, dtype=np.float64).T
    return Correlation(_pearson(c, b), _pearson(_ranks(c), _ranks(b)), len(pairs))


def draw_curves(series: Mapping[str, Sequence[CurvePoint]], path: Path) -> None:
    """The picture of Figs. 10–11; one line a series, each point labelled."""
    figure, axes = _figure("collision rate (%)", "accuracy (%)")
    for name, points in series.items():
        axes.plot([p.collision for p in points], [p.accuracy for p in points], marker="o", label=name)
        for p in points:
            axes.annotate(
                p.label, (p.collision, p.accuracy), textcoords="offset points", xytext=(4, -9), fontsize=7
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    _write(figure, path)


def draw_correlation(
    cross_entropy: Sequence[float],
    brierlm: Sequence[float | None],
    path: Path,
    runs: Sequence[str] | None = None,
) -> Correlation:
    """The picture of Fig. 3 with its correlations in the title.

    Args:
        cross_entropy, brierlm: of each checkpoint.
        path: the picture.
        runs: the run of each checkpoint; several get a colour each.
    """
    correlation = correlate(cross_entropy, brierlm)
    figure, axes = _figure("cross-entropy (nats a token)", "BrierLM")
    defined: dict[str, list[tuple[float, float]]] = {}
    for c, b, run in zip(cross_entropy, brierlm, runs or [""] * len(brierlm), strict=True):
        if b is not None:
            defined.setdefault(run, []).append((c, b))
    for run, points in defined.items():
        axes.plot(*zip(*points, strict=True), linestyle="none", marker="o", label=run)
    if len(defined) > 1:
        axes.legend()
    undefined = len(brierlm) - correlation.num_points
    axes.set_title(
        f"Pearson {correlation.pearson:.3f}, Spearman {correlation.spearman:.3f}, n {correlation.num_points}"
        + (f" ({undefined} with an undefined BrierLM left out)" if undefined else "")
    )
    _write(figure, path)
    return correlation


def _mean(rates: Sequence[float | None]) -> float:
    values = np.array([r or 0.0 for r in rates])
    return 100.0 * float(np.exp(np.log(values).mean())) if (values > 0).all() else 0.0


def _pearson(a: Any, b: Any) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Any) -> Any:
    """Average ranks, ties shared."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]


def _figure(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
