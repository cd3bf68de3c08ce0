"""Copy a prepared split to node-local storage before training, checked: one process per node copies."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from data_prep.cold import open_cold
from data_prep.errors import ShardError
from data_prep.manifest import MANIFEST_NAME, Manifest, ShardEntry
from data_prep.shards import checksum_of, read_header

Fetch = Callable[[str, Path], None]


def copy_file(name: str, target: Path) -> None:
    """The default way to fetch: copy from a mounted file system."""
    shutil.copyfile(name, target)


def stage_split(origin: str | Path, local_dir: Path, fetch: Fetch = copy_file) -> Path:
    """Bring the split at ``origin`` to ``local_dir`` and return ``local_dir``.

    ``fetch(name, target)`` copies one file, ``name`` being ``origin/<file>``: pass one that reads an object store
    to stage from there. Files already there with the right checksum are kept; the manifest comes last, so a
    folder with one is complete. Every process of a node may call this: one copies, the others wait.

    Raises:
        ShardError: a fetched shard does not have its checksum.
    """
    local_dir.mkdir(parents=True, exist_ok=True)
    with (local_dir / ".stage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetched = local_dir / f"{MANIFEST_NAME}.fetched"
        fetch(f"{origin}/{MANIFEST_NAME}", fetched)
        if (local_dir / MANIFEST_NAME).exists() and fetched.read_bytes() == (
            local_dir / MANIFEST_NAME
        ).read_bytes():
            fetched.unlink()
            return local_dir
        (local_dir / MANIFEST_NAME).unlink(missing_ok=True)
        trial = local_dir / ".manifest"
        trial.mkdir(exist_ok=True)
        fetched.replace(trial / MANIFEST_NAME)
        for entry in Manifest.read(trial).shards:
            _stage(f"{origin}/{entry.name}", local_dir / entry.name, entry, fetch)
        (trial / MANIFEST_NAME).replace(local_dir / MANIFEST_NAME)
        trial.rmdir()
    return local_dir


def _stage(name: str, target: Path, entry: ShardEntry, fetch: Fetch) -> None:
    if target.exists() and _is_right(target, entry):
        return
    part = target.with_name(target.name + ".part")
    fetch(name, part)
    part.replace(target)
    if not _is_right(target, entry):
        target.unlink()
        raise ShardError(f"{name} arrived damaged (its checksum is not {entry.checksum}); copy it again")


def _is_right(path: Path, entry: ShardEntry) -> bool:
    try:
        if entry.compressed:
            header, _ = open_cold(path)
            return f"{header.checksum:016x}" == entry.checksum
        return f"{read_header(path).checksum:016x}" == entry.checksum and checksum_of(path) == int(
            entry.checksum, 16
        )
    except ShardError:
        return False
