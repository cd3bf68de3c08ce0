"""`calm-scale eval` and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, JsonFile, Overrides
from calm_scale.config import load


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("eval", epilog="Example: calm-scale eval configs/runs/calm-xl.yaml --step 100000")(evaluate)
    app.command(
        "generate",
        epilog="Example: calm-scale generate configs/runs/calm-xl.yaml --prompt 'The sea' "
        "--set generation.temperature=0.333",
    )(generate)


Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Checkpoint step (default: newest complete).")
]


def evaluate(config: ConfigFile, set_: Overrides = None, step: Step = None, json: JsonFile = None) -> None:
    """BrierLM on held-out text: four components, their intervals, and the protocol they depend on."""
    from calm_scale.stages.evaluate import run_evaluation

    raise typer.Exit(run_evaluation(load(config, set_ or ()), step=step, json_file=json))


def generate(
    config: ConfigFile,
    set_: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue. Repeatable.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option("--jsonl", help="Read prompts from a JSON-lines file (`prompt`), print JSON lines."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File that --jsonl writes (default: stdout).")
    ] = None,
    step: Step = None,
) -> None:
    """Sample text: likelihood-free temperature sampling (Algorithm 1 or 2), streamed to the terminal."""
    from calm_scale.stages.generate import run_generation

    raise typer.Exit(
        run_generation(load(config, set_ or ()), prompts=prompt or [], jsonl=jsonl, out=out, step=step)
    )
