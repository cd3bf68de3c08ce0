"""Files that several processes and sudden deaths meet: written whole or not at all, and locked."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def write_atomically(path: Path, text: str) -> None:
    """Write beside, fsync and rename: ``path`` holds either what it held or all of ``text``, also after a power cut.

    Several processes may do so at once; the last one wins.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
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
