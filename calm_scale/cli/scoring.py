"""`calm-scale eval`, `compare`, `generate` and `score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import (
    ConfigFile,
    JsonFile,
    Overrides,
    TensorParallel,
    UsedDevice,
    output_file,
    user_path,
    with_device,
)
from calm_scale.config import RunConfig, load
from calm_scale.config.files import refuse_same_file


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("eval", epilog="Example: calm-scale eval configs/runs/calm-xl.yaml --step 100000")(evaluate)
    app.command(
        "generate",
        epilog="Example: calm-scale generate configs/runs/calm-xl.yaml --prompt 'The sea' "
        "--set generation.temperature=1/3",
    )(generate)

    app.command(
        "score", epilog="Example: calm-scale score configs/runs/calm-xl.yaml --text 'The sea is blue.'"
    )(score)
    app.command(
        "compare", epilog="Example: calm-scale compare a/eval/step_00001000.json b/eval/step_00001000.json"
    )(compare)


Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Checkpoint step (default: newest complete).")
]
LinesFile = Annotated[Path | None, output_file("--out", "Write JSON lines to this file (default: stdout).")]


def evaluate(
    config: ConfigFile,
    set_: Overrides = None,
    step: Step = None,
    coverage: Annotated[str | None, typer.Option("--coverage", help="first or all token offsets.")] = None,
    json: JsonFile = None,
    tensor_parallel: TensorParallel = None,
    device: UsedDevice = None,
) -> None:
    """BrierLM on held-out text: four components, their intervals, and the protocol they depend on."""
    refuse_same_file({"--json": json}, {"CONFIG": config})
    overrides = [*with_device(set_, device), *([f"evaluation.coverage={coverage}"] if coverage else [])]
    run = load(config, overrides)
    tensor = _in_ranks(run, tensor_parallel)
    from calm_scale.stages.evaluate import run_evaluation

    raise typer.Exit(run_evaluation(run, step=step, json_file=json, tensor=tensor))


def generate(
    config: ConfigFile,
    set_: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue. Repeatable.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            "--jsonl",
            help="Read prompts from a JSON-lines file (`prompt`), print JSON lines.",
            parser=user_path,
        ),
    ] = None,
    out: LinesFile = None,
    step: Step = None,
    tensor_parallel: TensorParallel = None,
    device: UsedDevice = None,
) -> None:
    """Sample text: likelihood-free temperature sampling (Algorithm 1 or 2), streamed to the terminal."""
    refuse_same_file({"--out": out}, {"CONFIG": config, "--jsonl": jsonl})
    run = load(config, with_device(set_, device))
    tensor = _in_ranks(run, tensor_parallel)
    from calm_scale.stages.texts import run_generation

    raise typer.Exit(
        run_generation(run, prompts=prompt or [], jsonl=jsonl, out=out, step=step, tensor=tensor)
    )


def score(
    config: ConfigFile,
    set_: Overrides = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="A text to score. Repeatable.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option("--jsonl", help="Read texts from a JSON-lines file (`text`).", parser=user_path),
    ] = None,
    out: LinesFile = None,
    step: Step = None,
    tensor_parallel: TensorParallel = None,
    device: UsedDevice = None,
) -> None:
    """Rank texts by their energy score under a model: likelihood-free, lower is better."""
    if not text and jsonl is None:
        raise typer.BadParameter("give --text or --jsonl")
    refuse_same_file({"--out": out}, {"CONFIG": config, "--jsonl": jsonl})
    run = load(config, with_device(set_, device))
    tensor = _in_ranks(run, tensor_parallel)
    from calm_scale.stages.texts import run_scoring

    raise typer.Exit(run_scoring(run, texts=text or [], jsonl=jsonl, out=out, step=step, tensor=tensor))


def _in_ranks(config: RunConfig, asked: int | None) -> int:
    """How many ranks hold the model; those started here end here, with their exit code."""
    from calm_scale.stages.launch import spawn_if_needed

    tensor = asked or config.evaluation.tensor_parallel
    config.require_lm().for_inference(tensor)  # refused before any rank is started
    code = spawn_if_needed(tensor)
    if code is not None:
        raise typer.Exit(code)
    return tensor


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What `eval` wrote.", parser=user_path)],
    second: Annotated[
        Path,
        typer.Argument(metavar="B.json", help="What `eval` wrote for the other run.", parser=user_path),
    ],
    json: JsonFile = None,
) -> None:
    """B against A, paired by document: differences of Brier-1..4 and BrierLM with their intervals."""
    refuse_same_file({"--json": json}, {"A.json": first, "B.json": second})
    from calm_scale.stages.evaluate import compare_evaluations

    raise typer.Exit(compare_evaluations(first, second, json))
