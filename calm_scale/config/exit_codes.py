"""What the exit status of a training process means: the one place where the numbers stand.

The launchers and the job scripts decide from these whether a job goes back into the queue.
"""

from __future__ import annotations

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
