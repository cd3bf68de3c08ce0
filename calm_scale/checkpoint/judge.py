"""The one judge of checkpoints: is this one complete, does it verify, may it be resumed, and which is the newest.

Everything that asks one of these questions asks here: the saver before it renames, the resume, the retention, the
list, the status, the run's id, the exports, the evaluation and the job script. No torch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import CheckpointError, NoSuchCheckpointError, NothingToResumeError
from calm_scale.checkpoint.file_list import (
    FileList,
    changed_contents,
    checkpoints_folder,
    folder_name,
    step_folders,
    unfinished,
    write_json,
)
from calm_scale.config.run_folder import StageFolder

State = Literal["complete", "suspect", "foreign", "damaged", "unfinished"]
"""
``complete``: whole, of this run, and may be resumed. ``suspect``: whole, but no finite step followed it; resumed only
when its step is asked for. ``foreign``: whole, but of another run. ``damaged``: its files are not those that were
written, or it does not have the name of its step. ``unfinished``: a save that was never committed.
"""

RUN_FILE = "run.json"
"""In the stage's folder, beside the checkpoints folder: which run it belongs to."""

Share = tuple[int, int]
"""Rank and number of ranks: which part of the bytes this process reads."""
EVERY_BYTE: Share = (0, 1)


@dataclass(frozen=True)
class Entry:
    """One judged step folder. ``reason`` says why it is not complete; empty when it is.

    ``verified`` is True when this process's share of the checksums was read just now, False when something did not
    fit, None when only names and sizes were looked at.
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

    @property
    def is_whole(self) -> bool:
        """All of it is there, whoever wrote it and whatever followed."""
        return self.state in ("complete", "suspect", "foreign")


def judge(folder: Path, step: int, *, run_id: str | None = None, share: Share | None = None) -> Entry:
    """Whether the checkpoint of ``step`` in ``folder`` is complete and may be resumed.

    Args:
        run_id: the run that asks; None: any run's counts.
        share: which part of the bytes to compare with their checksums; None: names and sizes only.
    """
    size, age = _size(folder), max(0.0, time.time() - folder.stat().st_mtime)
    card: Card | None = None
    try:
        card = Card.read(folder)
        age = max(0.0, time.time() - card.created)
        files = FileList.read(folder)
    except CheckpointError as error:
        return Entry(folder, step, "damaged", str(error), size, age, False, card)
    faults = files.missing_or_cut(folder)
    if not faults and card.step != step:
        faults = [f"its card.json is of step {card.step}; if the folder was renamed, rename it back"]
    if not faults and share is not None:
        faults = changed_contents(folder, files.share(*share))
    if faults:
        return Entry(folder, step, "damaged", summary(faults), size, age, False, card)
    state, reason = _standing(card, run_id)
    return Entry(folder, step, state, reason, size, age, None if share is None else True, card)


def changed_share(folder: Path, share: Share) -> list[str]:
    """One line for each file of the share whose bytes are not those that were written.

    Raises:
        CheckpointError: the folder's list of files cannot be read.
    """
    return changed_contents(folder, FileList.read(folder).share(*share))


def _standing(card: Card, run_id: str | None) -> tuple[State, str]:
    """What a whole checkpoint is to the run that asks."""
    if run_id is not None and card.run_id != run_id:
        return "foreign", f"belongs to another run ({card.run_id}, this is {run_id})"
    if card.suspect:
        return "suspect", f"suspect: {card.suspect}"
    return "complete", ""


def inventory(root: Path, deep: bool = False, run_id: str | None = None) -> list[Entry]:
    """Every step folder, lowest step first, unfinished saves last. ``root``: checkpoints folder or stage folder.

    Args:
        deep: compare every checksum.
        run_id: the run that asks; default the one that the stage's folder belongs to (``known_run``).

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    root = checkpoints_folder(root)
    share = EVERY_BYTE if deep else None
    run_id = run_id or known_run(root)
    try:
        committed = [
            _unless_gone(path, partial(judge, step=step, run_id=run_id, share=share))
            for step, path in step_folders(root)
        ]
        left = [_unless_gone(path, _unfinished) for path in unfinished(root)]
        return [entry for entry in committed + left if entry is not None]
    except OSError as error:
        raise CheckpointError(f"{error.filename or root} cannot be read: {error.strerror}") from None


def resumable(entries: Iterable[Entry]) -> list[Entry]:
    """Those that may be resumed unasked, newest first."""
    return sorted((entry for entry in entries if entry.state == "complete"), key=lambda entry: -entry.step)


def newest(root: Path, run_id: str | None = None) -> Entry | None:
    """The newest checkpoint that may be resumed, by names and sizes; None without any. Arguments and errors as
    ``inventory``."""
    return next(iter(resumable(inventory(root, run_id=run_id))), None)


def find(root: Path, step: int | None = None) -> Entry:
    """The newest checkpoint that may be resumed, or the one of ``step`` (a suspect one too), by names and sizes.

    Raises:
        NothingToResumeError: there is none; says what lies there instead.
        NoSuchCheckpointError: there are some, but no folder of ``step``.
    """
    root = checkpoints_folder(root)
    entries = inventory(root)
    complete = resumable(entries)
    asked = [entry for entry in entries if entry.step == step and entry.state in ("complete", "suspect")]
    if wanted := complete if step is None else asked:
        return wanted[0]
    have = ", ".join(str(entry.step) for entry in reversed(complete)) or "none"
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
    return judge(folder, int(number), run_id=known_run(folder.resolve().parent), share=EVERY_BYTE)


def known_run(checkpoints: Path) -> str | None:
    """The run that a checkpoints folder belongs to: ``run.json`` beside it; where that is lost, the run of the
    whole checkpoint written last (by time: a leftover may have a higher step). None where nothing tells."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((checkpoints.parent / RUN_FILE).read_bytes())["run_id"])
    entries = [_unless_gone(path, partial(judge, step=step)) for step, path in step_folders(checkpoints)]
    cards = [entry.card for entry in entries if entry and entry.is_whole and entry.card]
    return max(cards, key=lambda card: card.created).run_id if cards else None


def summary(faults: list[str], shown: int = 3) -> str:
    """The first few faults in one line."""
    more = f" and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(faults[:shown]) + more


def _unless_gone(path: Path, look: Callable[[Path], Entry]) -> Entry | None:
    """A running job renames and removes folders while we look; one that is gone by now is not listed."""
    try:
        return look(path)
    except FileNotFoundError:
        if path.exists():
            raise
        return None


def _unfinished(path: Path) -> Entry:
    size = _size(path)
    number = path.name.removeprefix("step_").removesuffix(".tmp")
    age = max(0.0, time.time() - path.stat().st_mtime)
    step = int(number) if number.isdigit() else 0
    return Entry(path, step, "unfinished", "the save was never completed", size, age)


def _size(folder: Path) -> int:
    """Bytes in a folder, files that vanish meanwhile not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def run_id(folder: Path, name: str) -> str:
    """The id in ``<stage folder>/run.json``; made on the first start, and found again from the checkpoints if lost.

    Call it on one rank. Raises CheckpointError when the file is there but cannot be read.
    """
    path = folder / RUN_FILE
    if path.exists():
        try:
            return str(json.loads(path.read_bytes())["run_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f'{path} is damaged ({error}); it holds {{"run_id": …}} of the cards'
            ) from None
    folder.mkdir(parents=True, exist_ok=True)
    found = known_run(StageFolder(folder).checkpoints) or f"{name}-{secrets.token_hex(4)}"
    write_json(path, {"run_id": found})
    return found
