"""The files of a checkpoints folder: their names, sizes and checksums, and how they are put on the disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from calm_scale.checkpoint.errors import CheckpointError
from calm_scale.config.files import write_atomically
from calm_scale.config.run_folder import StageFolder

FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """One file: path relative to the step folder, bytes, xxh3-64."""

    path: str
    size: int
    xxh3_64: str


@dataclass(frozen=True)
class FileList:
    """Every file of a checkpoint except the list itself."""

    files: tuple[FileEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def write(self, folder: Path) -> None:
        """Writes ``manifest.json``, durable on return."""
        entries = [asdict(entry) for entry in self.files]
        write_json(
            folder / MANIFEST, {"format_version": FORMAT_VERSION, "seal": _seal(entries), "files": entries}
        )

    @classmethod
    def read(cls, folder: Path) -> FileList:
        """Raises CheckpointError with the reason when there is no list or it is not whole."""
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_bytes())
            entries, seal, version = raw["files"], raw["seal"], raw["format_version"]
            files = tuple(FileEntry(str(e["path"]), int(e["size"]), str(e["xxh3_64"])) for e in entries)
        except FileNotFoundError:
            raise CheckpointError(f"no {MANIFEST}: the save was never completed") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{MANIFEST} is damaged") from None
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{MANIFEST} has format {version}; this program reads up to {FORMAT_VERSION}"
            )
        if seal != _seal(entries):
            raise CheckpointError(f"{MANIFEST} is damaged: its own checksum does not fit")
        if any(PurePosixPath(f.path).is_absolute() or ".." in PurePosixPath(f.path).parts for f in files):
            raise CheckpointError(f"{MANIFEST} names files outside of its folder")
        return cls(files)

    def missing_or_cut(self, folder: Path) -> list[str]:
        """One line per file that is absent or has another size. Reads no contents."""
        faults = []
        for entry in self.files:
            try:
                size = (folder / entry.path).stat().st_size
            except OSError as error:
                faults.append(f"{entry.path}: {(error.strerror or 'unreadable').lower()}")
                continue
            if size != entry.size:
                faults.append(f"{entry.path}: {size} bytes instead of {entry.size}")
        return faults

    def share(self, rank: int, world_size: int) -> tuple[FileEntry, ...]:
        """This rank's files to read, so that all ranks together read each once and about equally much."""
        return share_by_size(self.files, rank, world_size)

    def signature(self, folder: Path) -> tuple[tuple[str, int, int], ...]:
        """(path, size, time of change) of every file: as long as it is equal nobody wrote to them."""
        stats = [(entry.path, (folder / entry.path).stat()) for entry in self.files]
        return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def changed_contents(folder: Path, entries: Iterable[FileEntry]) -> list[str]:
    """One line per file whose bytes are not those that were written."""
    faults = []
    for entry in entries:
        try:
            found = checksum(folder / entry.path)
        except OSError as error:
            faults.append(f"{entry.path}: {(error.strerror or 'unreadable').lower()}")
            continue
        if found != entry.xxh3_64:
            faults.append(f"{entry.path}: checksum {found} instead of {entry.xxh3_64}")
    return faults


def share_by_size(files: Iterable[FileEntry], rank: int, world_size: int) -> tuple[FileEntry, ...]:
    """Largest first, each to the rank with the least so far; the same answer on every rank."""
    load = [0] * world_size
    mine = []
    for entry in sorted(files, key=lambda e: (-e.size, e.path)):
        owner = load.index(min(load))
        load[owner] += entry.size + 1
        if owner == rank:
            mine.append(entry)
    return tuple(mine)


def _seal(entries: object) -> str:
    return xxhash.xxh3_64(json.dumps(entries, sort_keys=True).encode()).hexdigest()


_BLOCK = 8 << 20


def checksum(path: Path, sync: bool = False) -> str:
    """xxh3-64 of a file, hexadecimal; with ``sync`` the file is flushed to the disk while it is read."""
    digest = xxhash.xxh3_64()
    block = bytearray(_BLOCK)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "fsync") as pool:
        flushing = pool.submit(os.fsync, file.fileno()) if sync else None
        while count := file.readinto(block):
            digest.update(view[:count])
        if flushing is not None:
            flushing.result()
    return digest.hexdigest()


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, and durable: temporary file, fsync, rename, fsync of the folder."""
    write_atomically(path, text)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """As ``write_text``, readable JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False, allow_nan=False) + "\n")


CARD = "card.json"
MANIFEST = "manifest.json"
SUSPECT = "suspect.json"
SHARDS = "shards"
LATEST = "latest"
TMP = ".tmp"
DELETING = ".deleting"

_STEP = re.compile(r"step_(\d{8,})")


def folder_name(step: int) -> str:
    """``step_00000100``. The number, not the text, is what gets compared."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a committed folder's name; None for everything else."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Folders with a committed name, lowest step first."""
    found = [(step_of(path.name), path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted((step, path) for step, path in found if step is not None)


def unfinished(root: Path) -> list[Path]:
    """``step_*.tmp`` folders: saves that never got committed."""
    return sorted(path for path in root.glob(f"step_*{TMP}") if path.is_dir()) if root.is_dir() else []


def checkpoints_folder(path: Path) -> Path:
    """The checkpoints folder for a stage's folder or for itself."""
    inner = StageFolder(path).checkpoints
    return inner if inner.is_dir() else path
