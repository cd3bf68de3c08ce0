"""The work folder ``data/.prep``: one lock, the plan, a record per finished segment, and claims of work.

A segment's record is written (atomically) after its shards have their final names, so what a record says is
there, is there, whenever the process was killed. Claims belong to one attempt; a new attempt starts with none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from calm_scale.config.data import SPLITS
from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.config.files import checked, read_object, write_atomically
from data_prep.changes import has_content_of, list_changes
from data_prep.errors import PrepError, PrepMistakeError
from data_prep.plan import Plan
from data_prep.record import SegmentRecord

WORK_FOLDER = ".prep"
_LOCK_FILE = ".prep.lock"
UNFINISHED = "the unfinished work of a prep"


class FolderLock:
    """One prep per data folder, on whatever machine; what a killed one leaves is taken over.

    Raises:
        PrepMistakeError: the folder cannot be made.
    """

    def __init__(self, data_dir: Path) -> None:
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise PrepMistakeError(f"{data_dir}: cannot be made ({error.strerror}); set `data`") from None
        self._path = data_dir / _LOCK_FILE
        self._held = ExitStack()

    def __enter__(self) -> FolderLock:
        """Take the lock.

        Raises:
            PrepMistakeError: another command holds it; says which.
        """
        try:
            self._held.enter_context(exclusive(self._path))
        except OccupiedError as error:
            raise PrepMistakeError(
                f"another command is writing {self._path.parent} ({error.holder}); wait for it, or end it first"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


def check_lock(data_dir: Path) -> None:
    """Refuse a folder as ``FolderLock`` would, without making anything.

    Raises:
        PrepMistakeError: the folder cannot be made, or another command is writing it.
    """
    place = data_dir
    while not place.exists():
        place = place.parent
    why = errno.ENOTDIR if not place.is_dir() else 0 if os.access(place, os.W_OK) else errno.EACCES
    if why:
        raise PrepMistakeError(f"{data_dir}: cannot be made ({os.strerror(why)}); set `data`")
    if (data_dir / _LOCK_FILE).exists():
        with FolderLock(data_dir):
            return


@dataclass(frozen=True)
class Journal:
    """Paths and records under ``data_dir/.prep``; ``attempt`` names this run's claims."""

    data_dir: Path
    attempt: str

    @property
    def root(self) -> Path:
        """The work folder."""
        return self.data_dir / WORK_FOLDER

    @property
    def attempt_dir(self) -> Path:
        """Claims, progress and errors of this attempt."""
        return self.root / f"attempt-{self.attempt}"

    def open(self, plan: Plan, *, restart: bool) -> None:
        """Adopt the folder for ``plan``: keep what an interrupted run of the same plan finished.

        Raises:
            PrepError: the folder holds unfinished work of another plan (and ``restart`` is off).
        """
        self._remove_discarded()
        if restart:
            self.clear()
        self.refuse_other_plan(plan, UNFINISHED)
        for name in (*(f"{split.name}/manifest.json" for split in plan.splits), "manifest.json"):
            (self.data_dir / name).unlink(missing_ok=True)
        for leftover in (*self.root.glob("attempt-*"),):
            shutil.rmtree(leftover, ignore_errors=True)
        places = (self.data_dir, *(self.data_dir / name for name in SPLITS), self.root / "records")
        for part in [part for place in places for part in place.glob("*.part")]:
            part.unlink(missing_ok=True)
        for folder in (self.root / "records", self.attempt_dir / "claims", self.attempt_dir / "progress"):
            folder.mkdir(parents=True, exist_ok=True)
        self.store_plan(plan)

    @property
    def _stated(self) -> Path:
        return self.data_dir / "plan.json"

    @property
    def has_plan(self) -> bool:
        """Whether ``plan.json`` is there."""
        return self._stated.exists()

    def store_plan(self, plan: Plan) -> None:
        """Write ``plan.json``, unless it says the same."""
        text = json.dumps({"key": plan.key, "settings": plan.settings}) + "\n"
        if not self._stated.exists() or self._stated.read_text(encoding="utf-8") != text:
            write_atomically(self._stated, text)

    def refuse_other_plan(
        self, plan: Plan, what: str, has_same_content: Callable[[int], bool | None] | None = None
    ) -> None:
        """Refuse a folder whose work belongs to another plan.

        ``has_same_content``: see ``list_changes``; by default it asks the records of unfinished work.

        Raises:
            PrepError: names what differs.
        """
        if not self._stated.exists():
            self._refuse_strangers()
            return
        remedy = "discard the old work with --restart"
        old = read_object(self._stated, remedy=remedy, raises=PrepMistakeError)
        settings = old.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("inputs"), list):
            raise PrepMistakeError(f"{self._stated} does not hold the settings of a prep; {remedy}")
        changes = list_changes(
            plan,
            settings,
            has_same_content or (lambda item: has_content_of(plan, item, self._read_recorded(item))),
        )
        if changes:
            raise PrepMistakeError(
                f"{self.data_dir} holds {what} with other settings or inputs ({'; '.join(changes)}). Nothing was "
                "mixed: put them back, choose another folder, or discard the old work with --restart"
            )

    def _read_recorded(self, item: int) -> dict[int, SegmentRecord]:
        """The records of an input's finished segments, by segment."""
        numbers = [int(path.stem[7:]) for path in self.root.glob(f"records/{item:06d}-*.json")]
        found = {number: self.read_record(item, number) for number in numbers}
        return {number: record for number, record in found.items() if record is not None}

    def _refuse_strangers(self) -> None:
        manifests = [self.data_dir / folder / "manifest.json" for folder in (".", *SPLITS)]
        found = next((path for path in manifests if path.exists()), None)
        if found is not None:
            raise PrepMistakeError(
                f"{found} is not known to be of this prep: {self._stated} is not there (an imported split, or "
                "removed). Choose another folder, or discard what is there with --restart"
            )

    def clear(self) -> None:
        """Remove every shard, manifest and record of earlier work; nothing that a prep has not written."""
        self.discard_work()
        for name in SPLITS:
            for pattern in ("*.shard", "*.shard.zst", "*.part", "manifest.json"):
                for path in (self.data_dir / name).glob(pattern):
                    path.unlink()
        for name in ("manifest.json", "quarantine.jsonl", "plan.json"):
            (self.data_dir / name).unlink(missing_ok=True)

    def discard_work(self) -> None:
        """Remove the records in one step: a kill leaves all of them, or none that anybody would believe."""
        if self.root.exists():
            self.root.rename(self.root.with_name(f"{WORK_FOLDER}-discarded-{self.attempt}"))
        self._remove_discarded()

    def _remove_discarded(self) -> None:
        for leftover in (*self.data_dir.glob(f"{WORK_FOLDER}-discarded-*"),):
            shutil.rmtree(leftover, ignore_errors=True)

    def record_path(self, item: int, segment: int) -> Path:
        """Where the record of (input, segment) stands; its tails and rejected lines stand beside it."""
        return self.root / "records" / f"{item:06d}-{segment:06d}.json"

    def read_record(self, item: int, segment: int) -> SegmentRecord | None:
        """The record of a finished segment, if its shards are all there."""
        path = self.record_path(item, segment)
        if not path.exists():
            return None
        remedy = "discard the unfinished work with --restart"
        raw = read_object(path, remedy=remedy, raises=PrepError)
        record = checked(SegmentRecord, raw, path, remedy=remedy, raises=PrepError)
        whole = all(
            (self.data_dir / name / s.name).exists()
            for name, out in record.splits.items()
            for s in out.shards
        )
        return record if whole else None

    def count_records(self) -> int:
        """Segments that earlier attempts finished."""
        return sum(1 for _ in self.root.glob("records/*.json"))

    def write_record(self, record: SegmentRecord) -> None:
        """The commit of a segment."""
        write_atomically(self.record_path(record.item, record.segment), record.model_dump_json() + "\n")

    def claim(self, name: str) -> bool:
        """Take ``name`` for this process; False when it was taken. Atomic on every file system."""
        try:
            os.close(os.open(self.attempt_dir / "claims" / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def fail(self, rank: int, text: str) -> None:
        """Tell every process of this attempt to stop, and why."""
        path = self.attempt_dir / f"error-{rank:05d}"
        try:
            write_atomically(path, text)
        except OSError:  # a full disk: an empty file needs no space
            path.touch()

    def failed(self) -> bool:
        """Whether a process of this attempt has failed."""
        return any(self.attempt_dir.glob("error-*"))
