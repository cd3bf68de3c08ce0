"""`calm-scale submit`, `status`, `cancel`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, Overrides, RunArgument, user_path
from calm_scale.config import load


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        epilog="Example: calm-scale submit configs/runs/calm-xl.yaml --cluster configs/clusters/example.yaml --dry-run"
    )(submit)
    app.command(epilog="Example: calm-scale status runs/calm-xl --watch")(status)
    app.command(epilog="Example: calm-scale cancel runs/calm-xl")(cancel)


def submit(
    config: ConfigFile,
    cluster: Annotated[
        Path,
        typer.Option(
            "--cluster", help="The cluster's profile, configs/clusters/NAME.yaml.", parser=user_path
        ),
    ],
    set_: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B",
            help="A run for each value, as a job array, e.g. --sweep lm.training.optimizer.lr=1e-4,2e-4. "
            "Repeatable: every combination.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the scripts, print the plan, queue nothing.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="NODE",
            help="Use a node again that a preflight of this run excluded (`status` lists them). Repeatable.",
        ),
    ] = None,
) -> None:
    """Queue prep → autoencoder → language model → evaluation on SLURM; the chain finishes by itself."""
    from calm_scale.stages.before_start import all_notes
    from calm_scale.stages.submit import submit_run, submit_the_sweep
    from calm_scale.stages.sweep import plan_sweep

    if sweep:
        planned = plan_sweep(config, set_ or (), sweep)
        notes = [*all_notes(planned.base, config, set_ or ()), *(f"note: {line}" for line in planned.notes)]
        raise typer.Exit(
            submit_the_sweep(planned, config, cluster, dry_run=dry_run, notes=notes, include=include or ())
        )
    run = load(config, set_ or ())
    notes = all_notes(run, config, set_ or ())
    raise typer.Exit(submit_run(run, config, cluster, dry_run=dry_run, notes=notes, include=include or ()))


def status(
    run: RunArgument, watch: Annotated[bool, typer.Option("--watch", help="Refresh every 10 s.")] = False
) -> None:
    """State, step, speed, ETA, restarts, last verified checkpoint: from disk, and from squeue where there is one."""
    from calm_scale.stages.status import show_status

    raise typer.Exit(show_status(run, watch))


def cancel(run: RunArgument) -> None:
    """Stop a run's jobs after they have saved a checkpoint."""
    from calm_scale.stages.submit import cancel_run

    raise typer.Exit(cancel_run(run))
