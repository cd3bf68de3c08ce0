"""Files that several processes and sudden deaths meet: written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
