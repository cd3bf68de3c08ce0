"""Errors written for people, and what the exit status of a process means.

The launchers and the job scripts decide from the exit status whether a job goes back into the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

EXIT_OK = 0
"""The job is finished."""

EXIT_ERROR = 1
"""It failed and would fail again: needs a person."""

EXIT_USAGE = 2
"""The command line or the configuration is wrong."""

EXIT_STALLED = 70
"""The watchdog ended a process that made no progress; the newest checkpoint stands."""

EXIT_REQUEUE = 75
"""Stopped on a signal with a complete checkpoint on disk: submit it again and it goes on."""

EXIT_NONFINITE = 76
"""The numbers of the training are no longer finite: starting it again would repeat that, so it needs a person. The
checkpoints from before are kept."""


class CalmScaleError(Exception):
    """Base of every error meant for people; the command line prints its text without a traceback and ends with
    ``exit_code``. ``may_pass``: whether the same command may succeed later or on another node, as it stands.
    ``is_consequence``: it only says that another rank or process failed, whose error is the one to show.
    ``shared_from``: the rank on which it occurred, once every rank of the job has it."""

    exit_code: int = EXIT_ERROR
    may_pass: bool = False
    is_consequence: bool = False
    shared_from: int | None = None


ErrorT = TypeVar("ErrorT", bound=BaseException)


def first_cause(errors: Sequence[ErrorT]) -> ErrorT:
    """Of one or more errors the first that is no consequence of another's failure; the first where all are."""
    causes = (e for e in errors if not (isinstance(e, CalmScaleError) and e.is_consequence))
    return next(causes, errors[0])


class ConfigError(CalmScaleError, ValueError):
    """A user's configuration mistake: says what is wrong, where (file:line or key path), and what to do."""

    exit_code: int = EXIT_USAGE
