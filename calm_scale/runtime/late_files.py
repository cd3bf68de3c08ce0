"""All ranks see the same files before they act on them, on file systems that show another machine's files late."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from calm_scale.config.files import (
    FILE_NOTICE_SECONDS,
    FILE_POLL_SECONDS,
    FILE_WAIT_VARIABLE,
    LateFileError,
    file_wait_seconds,
)
from calm_scale.runtime.world import World


def see_alike(world: World, folder: Path, look: Callable[[], set[str]]) -> None:
    """Return once ``look`` (what this rank sees of ``folder``) is the same on every rank. Every rank calls it.

    What no rank sees is not waited for.

    Raises:
        LateFileError: on every rank, when the time is up; names a file, a rank that sees it and one that does not.
    """
    limit, started, told = file_wait_seconds(), time.monotonic(), False
    while True:
        views = world.everywhere(lambda: (socket.gethostname(), look()))
        everything = set[str]().union(*(seen for _, seen in views))
        late = sorted((name, rank) for rank, (_, seen) in enumerate(views) for name in everything - seen)
        if not late:
            return
        name, blind = late[0]
        sees = next(rank for rank, (_, seen) in enumerate(views) if name in seen)
        what = f"{folder / name}: rank {sees} on {views[sees][0]} sees it, rank {blind} on {views[blind][0]} does not"
        waited = world.broadcast_object(time.monotonic() - started)
        if waited >= limit:
            error = LateFileError(
                f"{what}, after {limit:g} s. The file system shows files late, or not on every node; set "
                f"{FILE_WAIT_VARIABLE} to wait longer"
            )
            error.shared_from = 0  # every rank has it: the first one speaks
            raise error
        if waited >= FILE_NOTICE_SECONDS and not told:
            told = True
            if world.is_first:
                sys.stderr.write(f"{what} yet; waiting up to {limit:g} s ({FILE_WAIT_VARIABLE})\n")
                sys.stderr.flush()
        time.sleep(FILE_POLL_SECONDS)


def files_under(folder: Path, root: Path | None = None) -> set[str]:
    """Every file below ``folder`` with its size, named relative to ``root``; empty when there is no folder."""
    root = root or folder
    seen: set[str] = set()
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            if path.is_file():
                seen.add(f"{path.relative_to(root)} ({path.stat().st_size} bytes)")
        except OSError:
            continue  # gone, or not there yet
    return seen
