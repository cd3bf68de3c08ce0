"""One training per stage folder: two at once would write the same checkpoints and the same record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from calm_scale.config import CalmScaleError
from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.runtime.world import World

FILE = ".lock"
PATIENCE_SECONDS = 20.0
"""How long the ranks of a training that has just been killed may take to disappear."""


class FolderInUseError(CalmScaleError):
    """Another training holds the folder."""

    may_pass = True


@contextlib.contextmanager
def claimed(folder: Path, world: World, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds the stage's folder for this training. Every rank calls it; the first rank holds the lock.

    What a killed training leaves is taken over, on another machine once it gave no sign of life for
    ``exclusive.STALE_SECONDS``.

    Raises:
        FolderInUseError: another training still holds it after ``patience`` seconds; says which.
    """
    with contextlib.ExitStack() as held:
        world.on_first(lambda: _take(folder, patience, held))
        yield


def _take(folder: Path, patience: float, held: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(exclusive(folder / FILE, patience=patience))
    except OccupiedError as error:
        raise FolderInUseError(
            f"{folder} is being trained by {error.holder}: two at once would overwrite each other's checkpoints. "
            "Wait for it, stop it, or give this run another workdir"
        ) from None
