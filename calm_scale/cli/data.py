"""`calm-scale prep`: text to shards, and looking into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, DryRun, Overrides, RunByDefault, user_path
from calm_scale.config import load

group = typer.Typer(
    cls=RunByDefault,
    help="Tokenize and pack text into K-aligned shards: `prep CONFIG`; then `prep verify DIR`, `prep inspect DIR`.",
    epilog="Examples: calm-scale prep configs/runs/calm-xl.yaml --workers 8 · "
    "mpirun -n 16 calm-scale prep configs/runs/calm-xl.yaml · calm-scale prep verify runs/calm-xl/data/train",
    no_args_is_help=True,
)
ShardFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A split's folder (holds manifest.json).", parser=user_path)
]


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    app.add_typer(group, name="prep")


@group.command()
def run(
    config: ConfigFile,
    set_: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, help="Processes on this machine, without MPI (default: prep.workers)."
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an earlier prep and begin anew.")
    ] = False,
    compress: Annotated[bool, typer.Option("--compress", help="Store the shards as seekable zstd.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Prepare the data of a run (the same as `prep CONFIG`); under mpirun or srun --mpi=pmix on many nodes."""
    from calm_scale.stages.prep import run_prep

    raise typer.Exit(
        run_prep(
            load(config, set_ or ()), workers=workers, restart=restart, compress=compress, dry_run=dry_run
        )
    )


@group.command()
def verify(folder: ShardFolder) -> None:
    """Check every checksum, the arithmetic of the manifest, and the range of the token ids."""
    from calm_scale.stages.prep import verify_shards

    raise typer.Exit(verify_shards(folder))


@group.command()
def inspect(
    folder: ShardFolder,
    sequence: Annotated[int | None, typer.Option("--sequence", min=0, help="Show this sequence.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="Decode with this one (default: the data folder's copy).",
            parser=user_path,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Save the histogram of lengths (PNG).", parser=user_path),
    ] = None,
) -> None:
    """Show what a split holds: counts, sources, lengths; with --sequence, its text."""
    from calm_scale.stages.prep import inspect_shards

    raise typer.Exit(inspect_shards(folder, sequence, tokenizer, picture))


@group.command()
def compress(folder: ShardFolder) -> None:
    """Replace a split's shards by their zstd form, which trains as it is."""
    from calm_scale.stages.prep import compress_shards

    raise typer.Exit(compress_shards(folder))


@group.command()
def expand(folder: ShardFolder) -> None:
    """Bring compressed shards back to their plain form."""
    from calm_scale.stages.prep import expand_shards

    raise typer.Exit(expand_shards(folder))


@group.command("export-megatron")
def export_megatron(
    folder: ShardFolder,
    prefix: Annotated[
        Path, typer.Argument(metavar="PREFIX", help="Writes PREFIX.bin and .idx.", parser=user_path)
    ],
) -> None:
    """Write a split as a Megatron indexed dataset."""
    from calm_scale.stages.prep import export_pair

    raise typer.Exit(export_pair(folder, prefix))


@group.command("import-megatron")
def import_megatron(
    config: ConfigFile,
    prefix: Annotated[
        Path, typer.Argument(metavar="PREFIX", help="Reads PREFIX.bin and PREFIX.idx.", parser=user_path)
    ],
    set_: Overrides = None,
    split: Annotated[str, typer.Option("--split", help="train, autoencoder or heldout.")] = "train",
) -> None:
    """Repack a Megatron indexed dataset into a run's split, without tokenizing again."""
    from calm_scale.stages.prep import import_pair

    raise typer.Exit(import_pair(load(config, set_ or ()), prefix, split))
