"""`calm-scale train-ae` and `train-lm`."""

from __future__ import annotations

from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, DryRun, NumRanks, Overrides
from calm_scale.config import load

Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", metavar="FIELD", help="Resume although this changed field changes results. Repeatable."
    ),
]
RESUMES = (
    "Run it again after any stop: it resumes from the newest complete checkpoint. "
    "Exit code 75 means: stopped on a signal after saving."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        "train-ae", epilog=f"Example: calm-scale train-ae configs/runs/calm-xl.yaml --nproc 8. {RESUMES}"
    )(train_ae)
    app.command(
        "train-lm",
        epilog=f"Example: calm-scale train-lm configs/runs/calm-xl.yaml --set lm.parallel.pipeline=4. {RESUMES}",
    )(train_lm)


def train_ae(
    config: ConfigFile,
    set_: Overrides = None,
    nproc: NumRanks = None,
    accept: Accept = None,
    dry_run: DryRun = False,
) -> None:
    """Train the patch autoencoder under DeepSpeed ZeRO, then export it."""
    from calm_scale.stages import launch
    from calm_scale.stages.dry_run import dry_run as print_dry_run

    resolved = load(config, set_ or ())
    if dry_run:
        raise typer.Exit(print_dry_run(resolved, "autoencoder", nproc))
    ranks = nproc or launch.default_ranks(resolved, "autoencoder")
    code = launch.spawn_if_needed(ranks)
    if code is None:
        from calm_scale.stages.autoencoder import train_autoencoder

        code = train_autoencoder(resolved, accept or [])
    raise typer.Exit(code)


def train_lm(
    config: ConfigFile,
    set_: Overrides = None,
    nproc: NumRanks = None,
    accept: Accept = None,
    dry_run: DryRun = False,
) -> None:
    """Train the language model (CALM or the autoregressive baseline) on Megatron-core."""
    from calm_scale.stages import launch
    from calm_scale.stages.dry_run import dry_run as print_dry_run

    resolved = load(config, set_ or ())
    if dry_run:
        raise typer.Exit(print_dry_run(resolved, "lm", nproc))
    ranks = nproc or launch.default_ranks(resolved, "lm")
    code = launch.spawn_if_needed(ranks)
    if code is None:
        from calm_scale.stages.lm import train_lm as run

        code = run(resolved, accept or [])
    raise typer.Exit(code)
