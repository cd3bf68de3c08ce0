"""Pictures as inline SVG: no scripts, no fonts from elsewhere, readable on white."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calm_scale.accounting.report.document import Picture

ORANGE, BLUE, GREY, GREEN, RED = "#d9822b", "#2b6cb0", "#718096", "#2f855a", "#c53030"
_SIZE = (6.4, 3.6)


@dataclass(frozen=True)
class ScorePoint:
    """One run in the BrierLM picture; ``low`` and ``high`` are its interval where there is one."""

    name: str
    flops: float
    brierlm: float
    low: float | None = None
    high: float | None = None
    from_paper: bool = False


def patch_sizes(costs: Sequence[tuple[int, float, float]], training: float, inference: float) -> Picture:
    """Training and inference FLOPs per token over K, the AR baseline as dashed lines."""

    def draw() -> str:
        figure, axes = _figure()
        sizes = [k for k, _, _ in costs]
        for index, (label, colour, level) in enumerate(
            (("training", BLUE, training), ("inference", ORANGE, inference))
        ):
            axes.plot(sizes, [row[1 + index] for row in costs], "o-", color=colour, label=f"CALM {label}")
            axes.axhline(level, ls="--", lw=1, color=colour, label=f"AR baseline {label}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(k) for k in sizes])
        axes.set_yscale("log")
        axes.set_xlabel("patch size K (tokens)")
        axes.set_ylabel("FLOPs per token")
        axes.legend(fontsize=8, frameon=False)
        return _svg(figure)

    return Picture("patch_sizes", "FLOPs per token by patch size", "FLOPs per token over K, log scales", draw)


def shares(name: str, parts: Sequence[tuple[str, float, float]]) -> Picture:
    """Where training and inference FLOPs go, by part of the model."""

    def draw() -> str:
        figure, axes = _figure()
        labels = [part for part, _, _ in parts]
        rows = range(len(labels))
        axes.barh(
            [r - 0.2 for r in rows], [t for _, t, _ in parts], height=0.38, color=BLUE, label="training"
        )
        axes.barh(
            [r + 0.2 for r in rows], [i for _, _, i in parts], height=0.38, color=ORANGE, label="inference"
        )
        axes.set_yticks(list(rows), labels)
        axes.invert_yaxis()
        axes.set_xlabel("share of FLOPs per token (%)")
        axes.legend(fontsize=8, frameon=False)
        return _svg(figure)

    return Picture("shares", f"{name}: where the FLOPs go", "Share of FLOPs by part of the model", draw)


def stages(name: str, costs: Sequence[tuple[str, tuple[float, float, float]]]) -> Picture:
    """Work of every pipeline stage: input side, layers, output side (GFLOPs per token)."""

    def draw() -> str:
        figure, axes = _figure()
        labels = [label for label, _ in costs]
        below = [0.0] * len(costs)
        for index, (part, colour) in enumerate(
            (("input side", GREEN), ("layers", BLUE), ("head and loss", ORANGE))
        ):
            heights = [parts[index] / 1e9 for _, parts in costs]
            axes.bar(labels, heights, bottom=below, color=colour, label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_ylabel("training GFLOPs per token")
        _legend_beside(axes)
        return _svg(figure)

    return Picture("stages", f"{name}: work by pipeline stage", "Stacked work of every pipeline stage", draw)


def time_spent(name: str, attempts: Sequence[tuple[str, dict[str, float]]]) -> Picture:
    """Hours of every attempt by what they went into."""

    def draw() -> str:
        figure, axes = _figure()
        labels = [label for label, _ in attempts]
        below = [0.0] * len(attempts)
        kinds = (
            ("progress", GREEN),
            ("replay", RED),
            ("eval", BLUE),
            ("save", ORANGE),
            ("stall", "#805ad5"),
            ("load", "#319795"),
            ("other", GREY),
        )
        for kind, colour in kinds:
            hours = [spent.get(kind, 0.0) / 3600 for _, spent in attempts]
            axes.bar(labels, hours, bottom=below, color=colour, label=kind)
            below = [a + b for a, b in zip(below, hours, strict=True)]
        axes.set_xlabel("attempt")
        axes.set_ylabel("hours")
        _legend_beside(axes)
        return _svg(figure)

    return Picture("time_spent", f"{name}: where the time went", "Hours of every attempt by activity", draw)


def score_over_flops(points: Sequence[ScorePoint]) -> Picture:
    """BrierLM over training FLOPs, runs of ours beside the paper's rows (its Fig. 4)."""

    def draw() -> str:
        figure, axes = _figure()
        for point in points:
            colour = GREY if point.from_paper else BLUE
            if point.low is not None and point.high is not None:
                axes.plot([point.flops] * 2, [point.low, point.high], color=colour, lw=1.2)
            axes.plot(point.flops, point.brierlm, "o" if not point.from_paper else "x", color=colour)
            axes.annotate(
                point.name,
                (point.flops, point.brierlm),
                fontsize=7,
                xytext=(4, 3),
                textcoords="offset points",
            )
        axes.set_xscale("log")
        axes.set_xlabel("training FLOPs")
        axes.set_ylabel("BrierLM")
        return _svg(figure)

    return Picture("brierlm", "BrierLM over training FLOPs", "BrierLM over training FLOPs, log scale", draw)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="both", color="#e2e8f0", lw=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend_beside(axes: Any) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _svg(figure: Any) -> str:
    """The figure as one ``<svg>`` element; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "calm-scale", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
