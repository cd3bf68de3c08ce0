"""What can go wrong with checkpoints, as errors for people."""

from __future__ import annotations

import errno

from calm_scale.config.errors import CalmScaleError, ConfigError


class CheckpointError(CalmScaleError):
    """Base of this room's errors."""


class NoSuchCheckpointError(CheckpointError, ConfigError):
    """The path or the step that was asked for names no checkpoint."""


class UnknownRunError(CheckpointError, ConfigError):
    """The card's configuration is not one that this version knows."""


class SaveError(CheckpointError):
    """This save failed and left nothing behind; older checkpoints stand."""

    may_pass = True


class DiskFullError(SaveError):
    """Not enough space for this save."""


class NothingToResumeError(CheckpointError):
    """Step folders are there, but none is usable: starting again from step 0 needs a person's word."""


class ResumeRefusedError(CheckpointError, ConfigError):
    """The checkpoint belongs to another run or another configuration."""


DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def is_disk_full(error: BaseException) -> bool:
    """The error, or one it was raised from, says that the disk or the quota is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in DISK_FULL:
            return True
        if "No space left on device" in str(seen) or "Disk quota exceeded" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
