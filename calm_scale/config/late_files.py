"""Shared file systems show another machine's files late (attribute caching): how long that is waited for.

``CALM_SCALE_FILE_WAIT_SECONDS`` (30 unless set) bounds every such wait.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

from calm_scale.config.base import CalmScaleError, ConfigError

VARIABLE = "CALM_SCALE_FILE_WAIT_SECONDS"
WAIT_SECONDS = 30.0
WORD_SECONDS = 2.0
"""Whoever waits longer says for what."""
POLL_SECONDS = 0.25


class LateFileError(CalmScaleError):
    """A file that one process wrote has not become visible to another in time."""


def wait_seconds() -> float:
    """How long a late file is waited for.

    Raises:
        ConfigError: the variable is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else WAIT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{VARIABLE}={text}: give a number of seconds")
    return seconds


def wait_until_visible(missing: Callable[[], str]) -> str:
    """Ask ``missing`` what is not visible yet until it says nothing or the time is up; its last answer."""
    limit, started, told = wait_seconds(), time.monotonic(), False
    while what := missing():
        waited = time.monotonic() - started
        if waited >= limit:
            return what
        if waited >= WORD_SECONDS and not told:
            told = True
            sys.stderr.write(f"not visible here yet: {what}; waiting up to {limit:g} s ({VARIABLE})\n")
            sys.stderr.flush()
        time.sleep(min(POLL_SECONDS, limit - waited))
    return ""
