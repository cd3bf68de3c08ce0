"""What the demo's run wrote, as a page to open, a JSON for programs and a table for the terminal."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from calm_scale.accounting.costs import run_totals
from calm_scale.checkpoint.judge import find
from calm_scale.config import RunConfig
from calm_scale.config.files import write_output
from calm_scale.config.run_folder import RunFolder, Stage
from calm_scale.evaluation.evaluate import EvaluationResult
from calm_scale.evaluation.report import load as load_evaluation
from calm_scale.record import ledger
from calm_scale.record.metrics import Row, read_metrics
from calm_scale.stages.demo.commands import DemoError, DemoFolder


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Results:
    """The demo's results.

    ``layouts`` are the LM's layouts in the order they trained, ``resumed_at`` the step the second one took over.
    ``training_flops`` is what the language model and the autoencoder of this size cost by the accounting's count.
    """

    autoencoder_rows: list[Row]
    lm_rows: list[Row]
    evaluation: EvaluationResult
    layouts: list[str]
    resumed_at: int
    samples: list[Sample]
    training_flops: float

    @property
    def token_accuracy(self) -> float:
        """Held-out token accuracy of the autoencoder at its end, a fraction."""
        return float(last(self.autoencoder_rows, "eval/token_accuracy"))

    @property
    def tokens_per_second(self) -> float:
        """Median training speed of the language model over its last half."""
        rows = self.lm_rows[len(self.lm_rows) // 2 :]
        speeds = sorted(float(row["tokens_per_s"]) for row in rows)
        return speeds[len(speeds) // 2]

    def document(self, seconds: float) -> dict[str, Any]:
        """``summary.json``."""
        score = self.evaluation.score
        return {
            "ae_token_accuracy": self.token_accuracy,
            "brier": list(score.components),
            "brier_intervals": [
                list(interval) if interval else None for interval in score.component_intervals
            ],
            "brierlm": score.brierlm,
            "brierlm_interval": list(score.brierlm_interval) if score.brierlm_interval else None,
            "lm_layouts": self.layouts,
            "resumed_at_step": self.resumed_at,
            "lm_steps": self.lm_rows[-1]["step"],
            "lm_loss": last(self.lm_rows, "eval/loss"),
            "tokens_per_s": self.tokens_per_second,
            "training_flops": self.training_flops,
            "seconds": seconds,
        }


def read_results(folder: DemoFolder, training_flops: float, layouts: list[str]) -> Results:
    """Read everything; a missing piece is an error, not a gap in the report."""
    past = ledger.history(RunFolder(folder.run).stage(Stage.LM).ledger)
    starts = [event for event in past.events if event.kind == "start"]
    if len(starts) < 2:
        raise DemoError(
            f"{folder.run / 'lm'}: the language model was to be stopped and resumed, but it was not"
        )
    lm_rows = read_metrics(RunFolder(folder.run).stage(Stage.LM).metrics)
    return Results(
        autoencoder_rows=read_metrics(RunFolder(folder.run).stage(Stage.AUTOENCODER).metrics),
        lm_rows=lm_rows,
        evaluation=load_evaluation(
            RunFolder(folder.run).evaluations / f"step_{lm_rows[-1]['step']:08d}.json"
        ),
        layouts=layouts,
        resumed_at=starts[-1].first_step,
        samples=_samples(folder.samples),
        training_flops=training_flops,
    )


def last(rows: list[Row], name: str) -> Any:
    """The last value of a number in the record."""
    for row in reversed(rows):
        if row.get(name) is not None:
            return row[name]
    raise DemoError(f"the record holds no {name}")


def newest_layout(checkpoints: Path) -> str:
    """The layout that wrote the newest checkpoint, from its card: ``tp2 pp1 dp1``."""
    card = find(checkpoints).card
    if card is None:
        raise DemoError(f"{checkpoints}: the newest checkpoint has no card")
    return card.layout


def _samples(path: Path) -> list[Sample]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Sample(row["prompt"], row["text"]) for row in rows]


TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    folder: DemoFolder,
    config: RunConfig,
    *,
    layouts: list[str],
    seconds: float,
    commands: list[str],
    console: Console,
) -> None:
    """Write report.html and summary.json, print the summary table."""
    totals = run_totals(config)
    results = read_results(folder, totals.lm + totals.autoencoder, layouts)
    write_output(folder.summary, json.dumps(results.document(seconds), indent=2, allow_nan=False) + "\n")
    write_output(folder.report, _page(folder, config, results, seconds, commands))
    console.print(_table(folder, results, seconds))


def rows_of(results: Results, seconds: float) -> list[tuple[str, str]]:
    """The summary in words and numbers."""
    score = results.evaluation.score
    interval = score.component_intervals[0]
    low, high = interval or (float("nan"), float("nan"))
    brierlm = "n/a" if score.brierlm is None else f"{score.brierlm:z.3f}"
    if score.undefined_because:
        brierlm += f" ({score.undefined_because})"
    return [
        ("autoencoder token accuracy, held out", f"{100 * results.token_accuracy:.3f} %"),
        (
            "Brier-1, held out",
            f"{100 * (score.components[0] or 0):z.3f} %  (95 %: {100 * low:z.3f} – {100 * high:z.3f})",
        ),
        ("BrierLM", brierlm),
        ("language model trained as", " → ".join(results.layouts)),
        ("stopped and resumed at step", f"{results.resumed_at} of {results.lm_rows[-1]['step']}"),
        ("training speed", f"{results.tokens_per_second:,.0f} tokens/s"),
        ("training FLOPs (both models)", f"{results.training_flops:.3e}"),
        ("time", f"{seconds / 60:.1f} min"),
    ]


def _table(folder: DemoFolder, results: Results, seconds: float) -> Table:
    table = Table(title="calm-scale demo", title_justify="left", show_header=False)
    for name, value in rows_of(results, seconds):
        table.add_row(name, value)
    table.add_section()
    for name, path in _files(folder):
        table.add_row(name, os.path.relpath(folder.out / path))
    return table


def _files(folder: DemoFolder) -> list[tuple[str, str]]:
    return [
        ("report", "report.html"),
        ("FLOPs report", "flops.html"),
        ("FLOPs report for programs", "flops.json"),
        ("summary for programs", "summary.json"),
        ("samples", "samples.jsonl"),
        ("run document", "demo.yaml"),
        ("run folder", "run"),
    ]


def _page(
    folder: DemoFolder, config: RunConfig, results: Results, seconds: float, commands: list[str]
) -> str:
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True)
    score = results.evaluation.score
    brier_rows = [
        {
            "name": f"Brier-{n + 1}",
            "value": _percent(value),
            "interval": _interval(score.component_intervals[n]),
        }
        for n, value in enumerate(score.components)
    ]
    page: str = environment.get_template("report.html.j2").render(
        headline=(
            f"Text was prepared as token shards. They trained an autoencoder with K = {config.patch_size}, then a CALM "
            f"on its latents: as {results.layouts[0]} up to step {results.resumed_at}, then as {results.layouts[-1]}."
        ),
        result_rows=rows_of(results, seconds),
        curves=_curves(results),
        brier_rows=brier_rows,
        brier_note=(
            f"BrierLM {'n/a' if score.brierlm is None else f'{score.brierlm:z.3f}'}. "
            f"{score.undefined_because or ''} {score.num_documents} documents, {score.num_samples} samples a position."
        ),
        samples=results.samples,
        samples_note=(
            f"Algorithm 2, T = {config.generation.temperature}, N = {config.generation.num_candidates}. "
            "A model of this size does not write sense after minutes of training; the pipeline is the real one."
        ),
        files=_files(folder),
        commands=commands,
    )
    return page


def _curves(results: Results) -> list[Curve]:
    mark = [
        (
            results.resumed_at,
            f"step {results.resumed_at}: stopped as {results.layouts[0]},\nresumed as {results.layouts[-1]}",
        )
    ]
    return [
        draw(
            results.lm_rows,
            ["loss", "eval/loss"],
            "CALM: energy loss",
            "One record over both attempts: the second went on from the first one's sharded checkpoint.",
            mark,
        ),
        draw(
            results.autoencoder_rows,
            ["eval/token_accuracy", "eval/patch_accuracy"],
            "Autoencoder: held-out accuracy",
            "Share of held-out tokens and of whole patches that come back unchanged.",
        ),
    ]


def _percent(value: Any) -> str:
    return "n/a" if value is None else f"{100 * value:z.3f} %"


def _interval(interval: tuple[float, float] | None) -> str:
    return "n/a" if interval is None else f"{100 * interval[0]:z.3f} – {100 * interval[1]:z.3f}"


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
