"""Errors of this room; the command line prints their text without a traceback."""

from __future__ import annotations

from collections.abc import Mapping

from calm_scale.config import CalmScaleError, ConfigError


class LaunchError(CalmScaleError):
    """Something about starting, finding or queueing processes is wrong; says what and what to do."""


class ContradictionError(LaunchError):
    """Two layers of the environment disagree about who this process is."""


class InterfaceError(LaunchError, ConfigError):
    """The network interface that the ranks were told to use does not exist."""


def with_values(message: str, values: Mapping[str, str]) -> str:
    """``message`` followed by every environment variable it was judged from."""
    shown = "\n".join(f"  {name}={value}" for name, value in sorted(values.items()))
    return f"{message}\nThe environment says:\n{shown}" if shown else message
