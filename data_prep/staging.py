"""Copy a prepared split to node-local storage before training, checked: one process per node copies."""

from __future__ import annotations

import errno
import fcntl
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.errors import ShardError
from data_prep.manifest import MANIFEST_NAME, Manifest, ShardEntry
from data_prep.shards import HEADER_BYTES
from data_prep.verify import shard_problems

Fetch = Callable[[str, Path], None]
_STREAMS = 4


@dataclass(frozen=True)
class Staged:
    """What one staging did: bytes copied, shards found right as they were, seconds."""

    place: Path
    num_bytes: int
    num_kept: int
    seconds: float


def copy_file(name: str, target: Path) -> None:
    """The default way to fetch: copy from a mounted file system."""
    shutil.copyfile(name, target)


def stage_split(origin: str | Path, local_dir: Path, fetch: Fetch = copy_file) -> Staged:
    """Bring the split at ``origin`` to ``local_dir``.

    ``fetch(name, target)`` copies one file, ``name`` being ``origin/<file>``: pass one that reads an object store
    to stage from there (it is called by four threads). Every shard's checksum is checked, also of those that are
    there already, which are kept when right; the manifest comes last, so a folder with one is complete. Every
    process of a node may call this: one copies, the others wait.

    Raises:
        ShardError: a fetched shard does not have its checksum, or the local disk has no room.
    """
    started = time.monotonic()
    try:
        local_dir.mkdir(parents=True, exist_ok=True)
        with (local_dir / ".stage.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            num_kept, num_bytes = _bring(str(origin), local_dir, fetch)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ShardError(
                f"{local_dir}: the disk is full; free some space, or stage to another one"
            ) from None
        raise ShardError(f"{error.filename or local_dir}: {error.strerror or error}") from None
    return Staged(local_dir, num_bytes, num_kept, time.monotonic() - started)


def _bring(origin: str, local_dir: Path, fetch: Fetch) -> tuple[int, int]:
    """Shards kept and bytes copied."""
    trial = local_dir / ".manifest"
    trial.mkdir(exist_ok=True)
    fetch(f"{origin}/{MANIFEST_NAME}", trial / MANIFEST_NAME)
    manifest = Manifest.read(trial)
    with ThreadPoolExecutor(_STREAMS) as pool:
        right = list(pool.map(lambda entry: _is_right(local_dir, manifest, entry), manifest.shards))
        missing = [entry for entry, fits in zip(manifest.shards, right, strict=True) if not fits]
        if missing:
            (local_dir / MANIFEST_NAME).unlink(missing_ok=True)
            _refuse_full(local_dir, manifest, missing)
        sizes = list(pool.map(lambda entry: _copy(origin, local_dir, manifest, entry, fetch), missing))
    (trial / MANIFEST_NAME).replace(local_dir / MANIFEST_NAME)
    trial.rmdir()
    return len(manifest.shards) - len(missing), sum(sizes)


def _is_right(folder: Path, manifest: Manifest, entry: ShardEntry) -> bool:
    return (folder / entry.name).exists() and not shard_problems(folder, manifest, entry)


def _refuse_full(local_dir: Path, manifest: Manifest, missing: list[ShardEntry]) -> None:
    """Raises ShardError before anything is copied in vain (the size of a compressed shard is not known here)."""
    row = manifest.sequence_length * np.dtype(manifest.dtype).itemsize
    need = sum(HEADER_BYTES + entry.num_sequences * row for entry in missing if not entry.compressed)
    free = shutil.disk_usage(local_dir).free
    if need > free:
        raise ShardError(
            f"{local_dir}: {need / 1e9:,.3f} GB are still to be copied, {free / 1e9:,.3f} GB are free: free some "
            "space, stage to another disk, or read the shards where they are"
        )


def _copy(origin: str, local_dir: Path, manifest: Manifest, entry: ShardEntry, fetch: Fetch) -> int:
    target = local_dir / entry.name
    part = target.with_name(target.name + ".part")
    try:
        fetch(f"{origin}/{entry.name}", part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    if not _is_right(local_dir, manifest, entry):
        target.unlink()
        raise ShardError(
            f"{origin}/{entry.name} arrived damaged (its checksum is not {entry.checksum}); check it with "
            "`calm-scale prep verify`"
        )
    return target.stat().st_size
