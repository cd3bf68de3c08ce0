"""A command that is also a group: `prep CONFIG` runs, `prep verify DIR` is a subcommand."""

from __future__ import annotations

from typing import Any

import typer.core


class RunByDefault(typer.core.TyperGroup):
    """Falls back to the subcommand `run` when the first argument names no subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` before anything that is neither a subcommand nor a call for help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed
