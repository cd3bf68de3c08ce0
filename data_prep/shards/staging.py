"""Copy a prepared split to node-local storage before training, checked: one process per node copies."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calm_scale.config.exclusive import exclusive
from calm_scale.config.files import write_atomically
from data_prep.errors import ShardError, ShardStorageError
from data_prep.shards import HEADER_BYTES
from data_prep.shards.manifest import MANIFEST_NAME, Manifest, ShardEntry
from data_prep.shards.reading import find_shard_problems

_STREAMS = 4


Fetch = Callable[[str, Path], None]


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
    process of a node may call this, whoever's it is: one copies, the others wait. A copy that is right is not written
    to, so a user who may only read it can share it.

    Raises:
        ShardError: ``local_dir`` cannot be made, or not written to.
        ShardError: a fetched shard does not have its checksum, or the local disk has no room.
    """
    started = time.monotonic()
    try:
        with _alone(local_dir):
            num_kept, num_bytes = _bring(str(origin), local_dir, fetch)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ShardStorageError(
                f"{local_dir}: the disk is full; free some space, or stage to another one"
            ) from None
        raise ShardStorageError(f"{error.filename or local_dir}: {error.strerror or error}") from None
    return Staged(local_dir, num_bytes, num_kept, time.monotonic() - started)


@contextlib.contextmanager
def _alone(local_dir: Path) -> Iterator[None]:
    """The folder, made if need be, for one process of the node at a time; its lock file is for all users."""
    with contextlib.ExitStack() as held:
        try:
            local_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(local_dir / ".stage.lock", patience=None, mode=0o666))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ShardError(
                f"{local_dir}: cannot be written to ({error.strerror}); stage to another folder (reading.stage_to)",
                mistake=True,
            ) from None
        yield


def _bring(origin: str, local_dir: Path, fetch: Fetch) -> tuple[int, int]:
    """Shards kept and bytes copied."""
    with tempfile.TemporaryDirectory(prefix="calm-stage-") as trial:
        fetch(f"{origin}/{MANIFEST_NAME}", Path(trial) / MANIFEST_NAME)
        manifest = Manifest.read(Path(trial))
        text = (Path(trial) / MANIFEST_NAME).read_text(encoding="utf-8")
    held = local_dir / MANIFEST_NAME
    with ThreadPoolExecutor(_STREAMS) as pool:
        right = list(pool.map(lambda entry: _is_right(local_dir, manifest, entry), manifest.shards))
        missing = [entry for entry, fits in zip(manifest.shards, right, strict=True) if not fits]
        if missing:
            held.unlink(missing_ok=True)
            _refuse_full(local_dir, manifest, missing)
        sizes = list(pool.map(lambda entry: _copy(origin, local_dir, manifest, entry, fetch), missing))
    if not held.exists() or held.read_text(encoding="utf-8") != text:
        write_atomically(held, text)
    return len(manifest.shards) - len(missing), sum(sizes)


def _is_right(folder: Path, manifest: Manifest, entry: ShardEntry) -> bool:
    return (folder / entry.name).exists() and not find_shard_problems(folder, manifest, entry)


def _refuse_full(local_dir: Path, manifest: Manifest, missing: list[ShardEntry]) -> None:
    """Raises ShardStorageError before anything is copied in vain (the size of a compressed shard is not known here)."""
    row = manifest.sequence_length * np.dtype(manifest.dtype).itemsize
    need = sum(HEADER_BYTES + entry.num_sequences * row for entry in missing if not entry.compressed)
    free = shutil.disk_usage(local_dir).free
    if need > free:
        raise ShardStorageError(
            f"{local_dir}: {_size(need)} are still to be copied, {_size(free)} are free: free some space, "
            "stage to another disk, or read the shards where they are"
        )


def _size(count: int) -> str:
    """``1.50 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


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
