"""Pictures of a run, drawn from its record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm_scale.record.metrics import Row, read_metrics

_BOOKKEEPING = {
    "step",
    "attempt",
    "time",
    "samples",
    "tokens",
    "seconds",
    "cpu_seconds",
    "skipped",
    "nonfinite",
}


def draw_curves(metrics: Path, folder: Path) -> list[Path]:
    """``loss.png`` (training and evaluation loss) and ``curves.png`` (every number of the record) in ``folder``.

    Returns the files written; none when the record is empty.
    """
    rows = read_metrics(metrics)
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in _names(rows) if _points(rows, name)[0]]
    losses = [name for name in ("loss", "eval/loss") if name in names]
    panels = [[name] for name in names if not name.startswith("eval/")]
    for panel in panels:
        panel.extend(name for name in names if name == f"eval/{panel[0]}")
    shown = {name for panel in panels for name in panel}
    panels += [[name] for name in names if name not in shown]
    return [_draw(folder / "loss.png", rows, [losses]), _draw(folder / "curves.png", rows, panels)]


def _names(rows: Sequence[Row]) -> list[str]:
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(
            dict.fromkeys(k for k, v in row.items() if isinstance(v, int | float) and k not in _BOOKKEEPING)
        )
    return list(seen)


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row.get(name)) for row in rows]
    kept = [(step, float(v)) for step, v in pairs if isinstance(v, int | float) and math.isfinite(v)]
    return [step for step, _ in kept], [value for _, value in kept]


def _draw(path: Path, rows: Sequence[Row], panels: Sequence[Sequence[str]]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.5 * columns, 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for index, names in enumerate(panels):
        axes: Any = figure.add_subplot(lines, columns, index + 1)
        for name in names:
            steps, values = _points(rows, name)
            mark = "o-" if name.startswith("eval/") or len(steps) == 1 else "-"
            axes.plot(steps, values, mark, label=name, linewidth=1.2, markersize=3)
        axes.set_xlabel("optimizer step")
        axes.set_title(" · ".join(names), fontsize=10)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return path
