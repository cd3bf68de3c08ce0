"""Files that several processes and sudden deaths meet: written whole or not at all, and locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file written beside ``path``, which takes that name once all of it is on the disk; after a failure it is gone.

    ``path`` holds either what it held or all that was written, also after a power cut. Several processes may write it
    at once; the last one wins.

    Raises:
        OSError: names ``path``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """All of a ``new_file`` at once, in UTF-8."""
    with new_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError that says no file (a write to a full disk) say ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def lock(file: IO[str] | IO[bytes], *, wait: bool = False) -> bool:
    """Whether this process now holds the lock of an open, writable file; ``wait``: until it does.

    The kernel drops the lock when the process dies, however it dies. On a file system without locks (Lustre mounted
    without ``flock``) every process is told that it holds it, and the user that it protects nothing.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        folder = Path(file.name).parent
        sys.stderr.write(
            f"{folder}: its file system has no locks (on Lustre: mount with -o flock); nothing keeps a second command "
            "from writing there\n"
        )
    return True
