"""Floor 6: the command line; every command is a thin call."""

from calm_scale.cli.app import main

__all__ = ["main"]
