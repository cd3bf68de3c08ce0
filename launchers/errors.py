"""Errors of this room; the command line prints their text without a traceback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from calm_scale.config import CalmScaleError, ConfigError


class LaunchError(CalmScaleError):
    """Something about starting, finding or queueing processes is wrong; says what and what to do."""

    may_pass = True


class ContradictionError(LaunchError):
    """Two layers of the environment disagree about who this process is."""

    may_pass = False


FAILURES = "CALM_SCALE_FAILURES"
"""Names the folder in which a job script looks for errors that would happen again."""
_SAME_EVERYWHERE = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    FileExistsError,
)


def would_repeat(error: CalmScaleError) -> bool:
    """Whether the same command would fail again: for data, a configuration, a damaged file; not for a node or a disk.

    Behind an error that could be either, the operating system's own decides: a full disk or a failed read may pass.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno and not isinstance(behind, _SAME_EVERYWHERE):
            return False
        behind = behind.__cause__ or behind.__context__
    return type(error) is not CalmScaleError and not error.may_pass


def tell_job_script(error: CalmScaleError) -> None:
    """Leave a rank's last error where its job script finds it, if it would happen again: exit code, then the text."""
    folder = os.environ.get(FAILURES)
    if folder and would_repeat(error):
        rank = os.environ.get("SLURM_PROCID") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
        with contextlib.suppress(OSError):  # the job is then tried again, a bounded number of times
            (Path(folder) / f"rank_{int(rank):06d}").write_text(f"{error.exit_code}\n{error}\n")


class InterfaceError(LaunchError, ConfigError):
    """The network interface that the ranks were told to use does not exist."""

    may_pass = False


def with_values(message: str, values: Mapping[str, str]) -> str:
    """``message`` followed by every environment variable it was judged from."""
    shown = "\n".join(f"  {name}={value}" for name, value in sorted(values.items()))
    return f"{message}\nThe environment says:\n{shown}" if shown else message
