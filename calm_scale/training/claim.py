"""One training per stage folder: two at once would write the same checkpoints and the same record."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from calm_scale.config import CalmScaleError
from calm_scale.config.files import lock
from calm_scale.runtime.world import World

FILE = ".lock"
PATIENCE_SECONDS = 20.0
"""How long the ranks of a training that has just been killed may take to disappear."""


class FolderInUseError(CalmScaleError):
    """Another training holds the folder."""


@contextlib.contextmanager
def claimed(folder: Path, world: World, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds the stage's folder for this training. Every rank calls it; the first rank holds the lock.

    The kernel drops the lock when the process dies, however it dies. On a file system without locks nothing is held.

    Raises:
        FolderInUseError: another training still holds it after ``patience`` seconds; says which.
    """
    held: TextIO | None = None
    error: Exception | None = None
    if world.is_first:
        try:
            held = _take(folder, patience)
        except Exception as caught:  # raised on every rank
            error = caught
    error = world.broadcast_object(error)
    if error is not None:
        raise error
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _take(folder: Path, patience: float) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / FILE).open("a+", encoding="utf-8")
    deadline = time.monotonic() + patience
    told = False
    while not lock(file):
        if not told:
            told = True
            print(f"{folder} is in use; waiting {patience:.0f} s for it", file=sys.stderr, flush=True)
        if time.monotonic() >= deadline:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise FolderInUseError(
                f"{folder} is being trained by {holder}: two at once would overwrite each other's checkpoints. "
                "Wait for it, stop it, or give this run another workdir"
            )
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
