"""The end of the demo: a page to open, a JSON for programs, a table for the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from calm_scale.accounting.costs import run_totals
from calm_scale.config import RunConfig
from calm_scale.config.files import write_output
from calm_scale.stages.demo.curves import Curve, draw
from calm_scale.stages.demo.layout import DemoFolder
from calm_scale.stages.demo.results import Results, read_results

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
