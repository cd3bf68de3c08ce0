"""One continuous curve over several attempts and layouts, as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calm_scale.record.metrics import Row


@dataclass(frozen=True)
class Curve:
    """A picture for the report."""

    svg: str
    caption: str


def draw(
    rows: Sequence[Row], names: Sequence[str], title: str, caption: str, marks: Sequence[tuple[int, str]] = ()
) -> Curve:
    """Numbers of a metrics record against the step; ``marks`` are (step, label) of stops and resumes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    canvas: Any = FigureCanvasSVG(figure)
    axes: Any = figure.add_subplot()
    for name in names:
        points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        style: dict[str, Any] = (
            {"marker": "o", "markersize": 3} if name.startswith("eval/") else {"linewidth": 1}
        )
        axes.plot([step for step, _ in points], [value for _, value in points], label=name, **style)
    for step, label in marks:
        axes.axvline(step, color="tab:red", linestyle="--", linewidth=1)
        axes.annotate(
            label,
            (step, 0.97),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=8,
        )
    axes.set(title=title, xlabel="optimizer step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    buffer = io.StringIO()
    canvas.print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    return Curve(text[text.index("<svg") :], caption)
