"""`calm-scale config`: look at and check a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, Overrides, user_path
from calm_scale.config import ConfigError, config_hash, load, to_yaml

group = typer.Typer(help="Look at and check a configuration.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    app.add_typer(group, name="config")


@group.command(epilog="Example: calm-scale config show configs/runs/calm-xl.yaml --set lm.parallel.tensor=4")
def show(config: ConfigFile, set_: Overrides = None) -> None:
    """Print the resolved file: every default, every `extends:` and override applied, and what `auto` stands for."""
    from calm_scale.stages.plan.dry_run import save_notes

    resolved = load(config, set_ or ())
    typer.echo(to_yaml(resolved) + "".join(f"# {note}\n" for note in save_notes(resolved)), nl=False)


@group.command(epilog="Example: calm-scale config validate configs/runs/calm-xl.yaml --resume runs/calm-xl")
def validate(
    config: ConfigFile,
    set_: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", help="Also show what resuming this run folder would change.", parser=user_path
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", help="A changed field that may change the results. Repeatable."),
    ] = None,
) -> None:
    """Check a configuration, and what it finds on the disk, without a GPU, a node or torch."""
    from calm_scale.stages.before_start import all_notes, problems

    resolved = load(config, set_ or ())
    if found := problems(resolved):
        raise ConfigError("\n".join(found))
    typer.echo(f"{config}: valid · run {resolved.name} · hash {config_hash(resolved)}")
    for note in all_notes(resolved, config, set_ or ()):
        typer.echo(note)
    if resume is not None:
        from calm_scale.stages.before_start import print_resume_diff

        raise typer.Exit(print_resume_diff(resolved, resume, accept or []))


@group.command(epilog="Example: calm-scale config explain lm.training")
def explain(
    path: Annotated[
        str,
        typer.Argument(
            metavar="[PATH]",
            help="A section or a field; `cluster` for a cluster profile. All fields without it.",
        ),
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print every field in Markdown tables.")
    ] = False,
) -> None:
    """Print what fields mean, their values, units and defaults, and what a change does when a run resumes."""
    from calm_scale.config import fields

    typer.echo(fields.markdown() if markdown else fields.explain(path), nl=not markdown)
