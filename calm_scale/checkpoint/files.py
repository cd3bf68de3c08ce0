"""Files that are on the disk when we say so, and checksums that notice when they no longer are what they were."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from calm_scale.config.files import write_atomically

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
