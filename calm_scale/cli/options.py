"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, e.g. --set lm.training.steps=100. Repeatable."
    ),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder (its `workdir`).", show_default=False)
]
NumRanks = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks to start on this machine (default: what the layout needs)."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this JSON file.")]
