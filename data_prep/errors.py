"""The room's errors. Every message says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import shutil
import traceback
from pathlib import Path

from calm_scale.config.errors import CalmScaleError, ConfigError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, none in the quota, or a limit on the size of a file."""


class PrepError(CalmScaleError):
    """Preparing the data cannot go on. Its subclasses that name damaged or mistaken input would fail again."""

    may_pass = True


class PrepMistakeError(PrepError, ConfigError):
    """What was asked cannot be done as it was asked; repeating it would not help (exit code 2)."""

    may_pass = False


class StarvedSplitError(PrepMistakeError):
    """A split did not get one whole sequence."""


class ShardError(CalmScaleError):
    """A shard or manifest is missing, damaged, incomplete, or not what it says it is."""


class ShardStorageError(ShardError):
    """A folder of shards cannot be read or written just now: a full disk, a filesystem that does not answer."""

    may_pass = True


class ShardMistakeError(ShardError, ConfigError):
    """The shards asked for are not there, or cannot be what was asked (exit code 2)."""


class DiskFullError(PrepError):
    """A file system, a quota or a limit on the size of files left no room for a shard."""


class SourceError(PrepError):
    """An input cannot be read: missing, truncated, corrupt, or changed while it was being read."""


class CorruptSourceError(SourceError):
    """The content of an input is damaged: reading it again would find the same."""

    may_pass = False


class SourceMistakeError(SourceError, PrepMistakeError):
    """A source names nothing that can be read (exit code 2)."""


class TokenizerError(PrepError):
    """A tokenizer cannot be loaded, or two encoders disagree."""


class TokenizerMistakeError(TokenizerError, PrepMistakeError):
    """The tokenizer named is none, or lacks what the settings ask of it (exit code 2)."""


class EncoderMismatchError(TokenizerError):
    """A fast encoder gave other ids than the reference on a document of the corpus.

    ``reference`` names the encoder that is right.
    """

    may_pass = False

    def __init__(self, text: str, reference: str) -> None:
        super().__init__(text, reference)
        self.text, self.reference = text, reference

    def __str__(self) -> str:
        """The message alone."""
        return self.text


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
