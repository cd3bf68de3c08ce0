"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from calm_scale.config import ConfigError
from calm_scale.config.files import refuse_unwritable
from calm_scale.config.section import expand_user


def user_path(text: str) -> Path:
    """An argument that names a file or a folder: the shell leaves the ``~`` of ``--out=~/x`` as it is.

    Raises:
        ValueError: ``~`` names a user that this machine does not know.
    """
    return Path(expand_user(text))


def _can_be_written(path: Path | None) -> Path | None:
    """Refuse, before any work is done, a file that could not be written after it."""
    if path is not None:
        try:
            refuse_unwritable(path)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def output_file(option: str, help_: str) -> typer.models.OptionInfo:
    """An option that names a file to write; one that cannot be written is a mistake in what was asked."""
    info: typer.models.OptionInfo = typer.Option(
        option, help=help_, callback=_can_be_written, parser=user_path
    )
    return info


LARGEST_AMOUNT = 1e12


def _is_finite(number: float | None) -> float | None:
    """Refuse what no price can be multiplied with: `nan`, `inf`, and numbers that would overflow a total."""
    if number is not None and not 0 <= number <= LARGEST_AMOUNT:
        raise typer.BadParameter(f"{number} is not a number from 0 to {LARGEST_AMOUNT:g}")
    return number


def amount(option: str, help_: str) -> typer.models.OptionInfo:
    """An option that takes a price or another amount: finite, zero or more."""
    info: typer.models.OptionInfo = typer.Option(option, min=0, help=help_, callback=_is_finite)
    return info


ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False, parser=user_path),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, e.g. --set lm.training.steps=100. Repeatable."
    ),
]


def with_device(overrides: list[str] | None, device: str | None) -> list[str]:
    """The overrides of a command, and what ``--device`` adds to them: the option wins."""
    return [*(overrides or ()), *([f"device={device}"] if device else [])]


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run's folder (its `workdir`).", show_default=False, parser=user_path
    ),
]
UsedDevice = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option("--device", help="Where models run; the same as --set device=…", show_default=False),
]
NumRanks = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks to start on this machine (default: what the layout needs)."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel",
        metavar="N",
        min=1,
        help="Split the model over N ranks, which are started here unless a launcher has started them (default: "
        "evaluation.tensor_parallel).",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")]
JsonFile = Annotated[Path | None, output_file("--json", "Write the result to this JSON file.")]


class RunByDefault(typer.core.TyperGroup):
    """Falls back to the subcommand `run` when the first argument names no subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` before anything that is neither a subcommand nor a call for help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed
