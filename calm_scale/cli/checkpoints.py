"""`calm-scale ckpt`: list, look into, verify and convert checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import user_path

group = typer.Typer(help="List, look into, verify and convert checkpoints.", no_args_is_help=True)
Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A checkpoint: .../checkpoints/step_XXXXXXXX.", parser=user_path),
]


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    app.add_typer(group, name="ckpt")


@group.command(epilog="Example: calm-scale ckpt ls runs/calm-xl")
def ls(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run folder or a checkpoints folder.", parser=user_path),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare checksums; without it, sizes.")
    ] = False,
) -> None:
    """Steps, age, size, complete and verified or not, losses."""
    from calm_scale.stages.checkpoints import list_checkpoints

    raise typer.Exit(list_checkpoints(run, read_all=verify))


@group.command(epilog="Example: calm-scale ckpt newest runs/calm-xl/lm/checkpoints")
def newest(
    checkpoints: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINTS", help="A stage's folder, or its checkpoints folder.", parser=user_path
        ),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="All steps that may be resumed, newest first, one a line.")
    ] = False,
) -> None:
    """Print the newest step that a training would resume unasked, by names and sizes; -1 without any."""
    from calm_scale.stages.checkpoints import print_newest

    raise typer.Exit(print_newest(checkpoints, every=every))


@group.command(epilog="Example: calm-scale ckpt inspect runs/calm-xl/lm/checkpoints/step_00001000")
def inspect(checkpoint: Checkpoint) -> None:
    """The identity card: configuration, counters, fingerprints, topology."""
    from calm_scale.stages.checkpoints import inspect_checkpoint

    raise typer.Exit(inspect_checkpoint(checkpoint))


@group.command(epilog="Example: calm-scale ckpt verify runs/calm-xl/lm/checkpoints/step_00001000")
def verify(checkpoint: Checkpoint) -> None:
    """Check every file's size and checksum against the checkpoint's manifest."""
    from calm_scale.stages.checkpoints import verify_checkpoint

    raise typer.Exit(verify_checkpoint(checkpoint))


@group.command(
    epilog="Example: calm-scale ckpt export runs/calm-xl/lm/checkpoints/step_00001000 --out exported/"
)
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", parser=user_path)],
) -> None:
    """One-file safetensors of an autoencoder or language model, from any layout, without a GPU."""
    from calm_scale.stages.convert import export_checkpoint

    raise typer.Exit(export_checkpoint(checkpoint, out))


@group.command("import", epilog="Example: calm-scale ckpt import downloaded/ --out runs/imported")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A published checkpoint's folder.", parser=user_path)
    ],
    out: Annotated[Path, typer.Option("--out", help="Run folder to write.", parser=user_path)],
    autoencoder: Annotated[
        Path | None,
        typer.Option(
            "--autoencoder",
            help="The published autoencoder's folder (its config.json).",
            parser=user_path,
        ),
    ] = None,
) -> None:
    """Read a published CALM checkpoint (safetensors or .bin) into ours."""
    from calm_scale.stages.convert import import_checkpoint

    raise typer.Exit(import_checkpoint(folder, out, autoencoder))
