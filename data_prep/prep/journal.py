"""The work folder ``data/.prep``: one lock, the plan, a record per finished segment, and claims of work.

A segment's record is written (atomically) after its shards have their final names, so what a record says is
there, is there, whenever the process was killed. Claims belong to one attempt; a new attempt starts with none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from calm_scale.config.data import SPLITS
from calm_scale.config.files import checked, read_object, write_atomically
from data_prep.errors import PrepError
from data_prep.inputs import SAMPLE_BYTES, Input, identify_by_times
from data_prep.inputs.records import HARMLESS, Reader
from data_prep.prep.prep_plan import Plan
from data_prep.shards.manifest import ShardEntry

WORK_FOLDER = ".prep"
UNFINISHED = "the unfinished work of a prep"
_NAMED = 6


class SourceCounts(BaseModel):
    """Records of one source: read = kept + filtered + duplicates + Σ quarantined.

    ``inputs`` counts its files (a dataset is one), ``unusable`` those without a usable record.
    """

    name: str
    inputs: int = 0
    unusable: int = 0
    read: int = 0
    kept: int = 0
    filtered: int = 0
    duplicates: int = 0
    quarantined: dict[str, int] = {}

    @property
    def lost(self) -> int:
        """Bad records: blank lines and empty documents lose nothing."""
        return sum(count for kind, count in self.quarantined.items() if kind not in HARMLESS)

    @property
    def usable(self) -> int:
        """Records with a text, kept or not."""
        return self.kept + self.duplicates


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
        old = read_object(self._stated, remedy=remedy, raises=partial(PrepError, mistake=True))
        settings = old.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("inputs"), list):
            raise PrepError(f"{self._stated} does not hold the settings of a prep; {remedy}", mistake=True)
        changes = list_changes(
            plan,
            settings,
            has_same_content or (lambda item: has_content_of(plan, item, self._read_recorded(item))),
        )
        if changes:
            raise PrepError(
                f"{self.data_dir} holds {what} with other settings or inputs ({'; '.join(changes)}). Nothing was "
                "mixed: put them back, choose another folder, or discard the old work with --restart",
                mistake=True,
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
            raise PrepError(
                f"{found} is not known to be of this prep: {self._stated} is not there (an imported split, or "
                "removed). Choose another folder, or discard what is there with --restart",
                mistake=True,
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

    def stop(self) -> None:
        """Make every process of this attempt stop."""
        (self.attempt_dir / "stopped").touch()

    def is_stopped(self) -> bool:
        """Whether a process of this attempt has failed."""
        return (self.attempt_dir / "stopped").exists()


class SplitOutput(BaseModel):
    """One split's part of a segment. ``tail_tokens`` ids wait in ``<record>.<split>.tail``."""

    model_config = ConfigDict(extra="forbid")

    shards: list[ShardEntry] = []
    documents: int = 0
    text_tokens: int = 0
    bos: int = 0
    eos: int = 0
    padding: int = 0
    tail_tokens: int = 0
    length_histogram: list[int] = []


class SegmentRecord(BaseModel):
    """One finished segment. ``last``: nothing of the input follows, and its end was verified."""

    model_config = ConfigDict(extra="forbid")

    item: int
    segment: int
    last: bool
    read: int = 0
    filtered: int = 0
    duplicates: int = 0
    quarantined: dict[str, int] = {}
    text_bytes: int = 0
    content: str = ""
    """Hash of what was read, as ``Reader.digest`` gives it; empty in records of versions that did not keep it."""
    notes: dict[str, int] = {}
    splits: dict[str, SplitOutput] = {}
    corrupt: str | None = None
    """Why the input was given up (on_corrupt_file: quarantine); its segments are then left out."""


def list_changes(
    plan: Plan, earlier: Mapping[str, Any], has_same_content: Callable[[int], bool | None]
) -> list[str]:
    """What differs between the settings of earlier work and a plan, each with both values; empty where nothing does.

    Args:
        has_same_content: whether input i holds what the earlier work read; ``None`` where that was not recorded.
            Asked for inputs with the same size, the same ends and another time of change.
    """
    old = [dict(item) for item in earlier.get("inputs", [])]
    inputs = _list_input_changes(plan, old, has_same_content)
    derived = {
        "inputs",
        *(("segment_bytes",) if inputs else ()),
    }  # the size of a segment follows from the inputs
    settings = _differences(
        {key: value for key, value in earlier.items() if key not in derived},
        {key: value for key, value in plan.settings.items() if key not in derived},
    )
    changes = settings + inputs
    more = len(changes) - _NAMED
    return changes[:_NAMED] + ([f"and {more} more"] if more > 0 else [])


def _list_input_changes(
    plan: Plan, old: list[dict[str, Any]], has_same_content: Callable[[int], bool | None]
) -> list[str]:
    keys = [(item.get("source"), item.get("name")) for item in old]
    new = [(item.source, item.name) for item in plan.inputs]
    if keys != new:
        gone = [f"{name} is not an input any more" for source, name in keys if (source, name) not in new]
        added = [f"{name} is a new input" for source, name in new if (source, name) not in keys]
        return gone + added or ["the order of the inputs"]
    changes = (_describe_change(plan, i, item, has_same_content) for i, item in enumerate(old))
    return [change for change in changes if change]


def _describe_change(
    plan: Plan, number: int, old: dict[str, Any], has_same_content: Callable[[int], bool | None]
) -> str:
    """How an input differs from what it was; empty where its content is the same."""
    new = plan.inputs[number]
    for key in ("kind", "size"):
        if old.get(key) != getattr(new, key):
            return f"{new.name}: {key} {old.get(key)} → {getattr(new, key)}"
    if (
        new.kind == "dataset" and old.get("mtime_ns") == 0
    ):  # known by its files' times, before their content was
        split = plan.prep.sources[new.source].split
        same = identify_by_times(new.name, split) == old.get("identity")
        return "" if same else f"{new.name}: its files or their times"
    if new.identity != old.get("identity"):
        return f"{new.name}: its {'commit' if new.kind == 'hub' else 'content'}"
    return "" if new.mtime_ns == old.get("mtime_ns") else _compare_content(new, old, has_same_content(number))


def _compare_content(new: Input, old: dict[str, Any], same_content: bool | None) -> str:
    """What to say of an input with the same size and ends and another time of change; empty where it is the same."""
    if same_content is None and not new.is_dataset and new.size <= 2 * SAMPLE_BYTES:
        return ""  # its ends are all it has
    if same_content is None and new.kind not in ("zst", "gz"):  # these end with a checksum of what is in them
        return (
            f"{new.name}: its time of change, and the earlier work did not record its content; if it is the same, "
            f"restore the time: touch -d @{old.get('mtime_ns', 0) / 1e9:.9f} FILE"
        )
    return "" if same_content is not False else f"{new.name}: its content, at the same size"


def has_content_of(plan: Plan, number: int, records: Mapping[int, SegmentRecord]) -> bool | None:
    """Whether the segments in ``records`` would be read as they were; ``None`` where a record does not say, or the
    pass that looks for duplicates read more than they tell."""
    if plan.prep.deduplicate or any(not record.content for record in records.values()):
        return None
    reader = _open(plan, number)
    return all(reader.digest(segment) == records[segment].content for segment in sorted(records))


def has_digest(plan: Plan, number: int, recorded: str) -> bool | None:
    """Whether an input, read to its end, has the digest that a finished prep recorded; ``None`` where it has none."""
    if not recorded:
        return None
    reader = _open(plan, number)
    digests: list[str] = []
    while not digests or not reader.ended:
        digests.append(reader.digest(len(digests)))
    return join_digests(digests) == recorded


def join_digests(segments: list[str]) -> str:
    """One digest of an input's segments, in order; empty where one is unknown."""
    return xxhash.xxh3_128_hexdigest(" ".join(segments).encode()) if all(segments) else ""


def _open(plan: Plan, number: int) -> Reader:
    item = plan.inputs[number]
    return Reader(item, plan.prep.sources[item.source], plan.segment_bytes)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Key paths whose values differ, with both values, shortened."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            d
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for d in _differences(a, b, f"{path}[{i}]")
        ]
    return [] if old == new else [f"{path}: {_shorten(old)} → {_shorten(new)}"]


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


class HashFile:
    """Hashes uint64 [n, 2] of one segment; row 0 of the file: whether it is the last, whether the input is corrupt."""

    def __init__(self, journal: Journal, item: int, segment: int) -> None:
        self.path = journal.record_path(item, segment).with_suffix(".hashes.npy")

    def write(self, hashes: NDArray[np.uint64], *, last: bool, corrupt: bool = False) -> None:
        """Write in one atomic step."""
        _save_array(self.path, np.concatenate([np.array([[last, corrupt]], np.uint64), hashes]))

    def last(self) -> bool | None:
        """Whether the segment is its input's last; ``None`` when it has not been hashed."""
        if not self.path.exists():
            return None
        return bool(np.load(self.path, mmap_mode="r")[0, 0])

    def corrupt(self) -> bool:
        """Whether the input was found corrupt in this segment: all of it is then left out."""
        return bool(np.load(self.path, mmap_mode="r")[0, 1])

    def rows(self) -> NDArray[np.uint64]:
        """The hashes [n, 2], memory-mapped."""
        mapped: NDArray[np.uint64] = np.load(self.path, mmap_mode="r")[1:]
        return mapped


class DropList:
    """Ordinals of one segment's documents that repeat an earlier document."""

    def __init__(self, journal: Journal, item: int, segment: int) -> None:
        self.path = journal.record_path(item, segment).with_suffix(".drop.npy")

    def read(self) -> frozenset[int]:
        """The ordinals; empty where nothing repeats."""
        return frozenset(np.load(self.path).tolist()) if self.path.exists() else frozenset()

    def write(self, ordinals: NDArray[np.int64]) -> None:
        """Write in one atomic step."""
        _save_array(self.path, ordinals)


def _save_array(path: Path, array: NDArray[Any]) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.save(file, array)
    part.replace(path)
