"""The room's errors. Every message says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import shutil
import traceback
from pathlib import Path

from calm_scale.config.errors import EXIT_USAGE, CalmScaleError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, none in the quota, or a limit on the size of a file."""


class _DataError(CalmScaleError):
    """``mistake``: what was asked cannot be done as it was asked; repeating it would not help (exit code 2)."""

    def __init__(self, text: str, *, mistake: bool = False) -> None:
        super().__init__(text)
        if mistake:
            self.exit_code, self.may_pass = EXIT_USAGE, False


class PrepError(_DataError):
    """Preparing the data cannot go on. Its subclasses that name damaged input would fail again."""

    may_pass = True


class StarvedSplitError(PrepError):
    """A split did not get one whole sequence (exit code 2)."""

    exit_code = EXIT_USAGE
    may_pass = False


class DiskFullError(PrepError):
    """A file system, a quota or a limit on the size of files left no room for a shard."""


class ShardError(_DataError):
    """A shard or manifest is missing, damaged, incomplete, or not what it says it is."""


class ShardStorageError(ShardError):
    """A folder of shards cannot be read or written just now: a full disk, a filesystem that does not answer."""

    may_pass = True


class SourceError(PrepError):
    """An input cannot be read: missing, truncated, corrupt, or changed while it was being read."""


class CorruptSourceError(SourceError):
    """The content of an input is damaged: reading it again would find the same."""

    may_pass = False


class TokenizerError(PrepError):
    """A tokenizer cannot be loaded."""


class EncoderMismatchError(TokenizerError):
    """A fast encoder gave other ids than the encoder ``reference``, which is right."""

    may_pass = False

    def __init__(self, text: str, reference: str) -> None:
        super().__init__(text)
        self.reference = reference

    def __reduce__(self) -> tuple[type[EncoderMismatchError], tuple[str, str], dict[str, object]]:
        """Other processes get the reference too."""
        return type(self), (str(self), self.reference), self.__dict__


def describe_full_disk(path: Path | None, missing: int = 0) -> str:
    """What to say when ``path`` could not be written for want of room; ``missing``: bytes that were to be added."""
    facts = f" at {path}" if path else ""
    place = next((parent for parent in path.absolute().parents if parent.exists()), None) if path else None
    if place is not None:
        needed = f"{missing:,} bytes were to be written, " if missing else ""
        facts += f" ({needed}its file system has {shutil.disk_usage(place).free:,} bytes free)"
    return (
        f"the disk is full{facts}: free some space (or raise the quota or the limit on file sizes) and rerun prep; "
        "finished segments are kept, unfinished files were removed"
    )


def explain(error: BaseException, who: str) -> str:
    """What to tell people about an error that ends a prep; ``who`` names the process for unexpected ones."""
    if isinstance(error, CalmScaleError):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return describe_full_disk(Path(error.filename) if error.filename else None)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return f"{who} of the prep failed unexpectedly:\n{''.join(traceback.format_exception(error))}"
