"""What lies in a checkpoints folder, seen from one process and without torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import CheckpointError, NoSuchCheckpointError, NothingToResumeError
from calm_scale.checkpoint.layout import checkpoints_folder, folder_name, step_folders, unfinished
from calm_scale.checkpoint.manifest import FileList, changed_contents

State = Literal["complete", "damaged", "unfinished"]


@dataclass(frozen=True)
class Entry:
    """One step folder. ``reason`` says what is wrong with it; empty when nothing is.

    ``verified`` is True when every checksum was read just now, False when one did not fit, None when only names
    and sizes were looked at.
    """

    path: Path
    step: int
    state: State
    reason: str = ""
    size: int = 0
    age_seconds: float = 0.0
    verified: bool | None = None
    card: Card | None = None

    @property
    def run_id(self) -> str | None:
        """The run it belongs to, where the card can be read."""
        return self.card.run_id if self.card else None


def examine(folder: Path, step: int, deep: bool = False) -> Entry:
    """Looks at one step folder: card, file list, every size; with ``deep`` also every checksum."""
    size = _size(folder)
    age = max(0.0, time.time() - folder.stat().st_mtime)
    card: Card | None = None
    try:
        card = Card.read(folder)
        files = FileList.read(folder)
    except CheckpointError as error:
        return Entry(folder, step, "damaged", str(error), size, age, card=card)
    age = max(0.0, time.time() - card.created)
    faults = files.missing_or_cut(folder)
    if not faults and card.step != step:
        faults = [f"the card says step {card.step}"]
    if not faults and deep:
        faults = changed_contents(folder, files.files)
    if faults:
        return Entry(folder, step, "damaged", summary(faults), size, age, False, card)
    return Entry(folder, step, "complete", "", size, age, True if deep else None, card)


def inventory(root: Path, deep: bool = False) -> list[Entry]:
    """Every step folder, lowest step first, unfinished saves last. ``root``: checkpoints folder or stage folder.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    root = checkpoints_folder(root)
    try:
        committed = [
            _unless_gone(path, partial(examine, step=step, deep=deep)) for step, path in step_folders(root)
        ]
        left = [_unless_gone(path, _unfinished) for path in unfinished(root)]
        return [entry for entry in committed + left if entry is not None]
    except OSError as error:
        raise CheckpointError(f"{error.filename or root} cannot be read: {error.strerror}") from None


def _unless_gone(path: Path, look: Callable[[Path], Entry]) -> Entry | None:
    """A running job renames and removes folders while we look; one that is gone by now is not listed."""
    try:
        return look(path)
    except FileNotFoundError:
        if path.exists():
            raise
        return None


def find(root: Path, step: int | None = None) -> Entry:
    """The newest complete checkpoint, or the one of ``step``, by names and sizes.

    Raises:
        NothingToResumeError: there is none; says what lies there instead.
        NoSuchCheckpointError: there are some, but no folder of ``step``.
    """
    root = checkpoints_folder(root)
    entries = inventory(root)
    complete = [entry for entry in entries if entry.state == "complete"]
    wanted = [entry for entry in complete if step is None or entry.step == step]
    if wanted:
        return max(wanted, key=lambda entry: entry.step)
    have = ", ".join(str(entry.step) for entry in complete) or "none"
    others = "".join(
        f"\n  {entry.path.name}: {entry.reason}" for entry in entries if entry.state != "complete"
    )
    what = "a complete checkpoint" if step is None else f"a complete {folder_name(step)}"
    mistaken = step is not None and complete and all(entry.step != step for entry in entries)
    kind = NoSuchCheckpointError if mistaken else NothingToResumeError
    raise kind(f"{root} does not hold {what}. Complete steps: {have}{others}")


def verify(folder: Path) -> Entry:
    """Reads every byte of one step folder and compares it with what was written.

    Raises:
        NoSuchCheckpointError: ``folder`` is not a step folder.
    """
    name = folder.resolve().name
    number = name.removeprefix("step_").split(".")[0]
    if not folder.is_dir() or not name.startswith("step_") or not number.isdigit():
        raise NoSuchCheckpointError(f"{folder} is not a checkpoint: give a folder named {folder_name(0)}, …")
    if name.endswith(".tmp"):
        return _unfinished(folder)
    return examine(folder, int(number), deep=True)


def summary(faults: list[str], shown: int = 3) -> str:
    """The first few faults in one line."""
    more = f" and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(faults[:shown]) + more


def _unfinished(path: Path) -> Entry:
    size = _size(path)
    step = int(path.name.removeprefix("step_").removesuffix(".tmp") or 0)
    age = max(0.0, time.time() - path.stat().st_mtime)
    return Entry(path, step, "unfinished", "the save was never completed", size, age)


def _size(folder: Path) -> int:
    """Bytes in a folder, files that vanish meanwhile not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total
