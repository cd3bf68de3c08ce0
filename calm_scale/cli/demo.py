"""`calm-scale demo`: the whole pipeline on this machine, on real text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import user_path


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(epilog="Example: calm-scale demo --quick --out demo-out")(demo)


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder of the demo's run; a second call starts it anew.", parser=user_path
        ),
    ] = Path("demo-out"),
    quick: Annotated[bool, typer.Option("--quick", help="The 3-minute version.")] = False,
) -> None:
    """The whole pipeline on this CPU: real text, MPI prep, ZeRO, Megatron TP 2 stopped and resumed as PP 2, scores."""
    from calm_scale.stages.demo import run_demo

    raise typer.Exit(run_demo(out, quick=quick))
