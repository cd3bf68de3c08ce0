"""Small derived files in the user's cache folder: what takes seconds to work out again, and nothing else.

Losing the folder costs those seconds; a folder that cannot be written is no error.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from calm_scale.config.files import write_atomically


def cache_file(kind: str, key: str) -> Path:
    """Where the entry of ``kind`` with ``key`` (any text) stands."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "calm-scale" / kind / f"{xxhash.xxh3_128_hexdigest(key.encode())}.json"


def load_cached(kind: str, key: str) -> str | None:
    """The entry's text; ``None`` when it is missing or damaged."""
    try:
        digest, _, text = cache_file(kind, key).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == xxhash.xxh3_128_hexdigest(text.encode()) else None


def save_cached(kind: str, key: str, text: str) -> None:
    """Keep an entry, if the folder can be written."""
    file = cache_file(kind, key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
    except OSError:
        return
