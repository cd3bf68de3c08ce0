"""Files of JSON lines that only grow: a reader that no torn line stops, and a writer that no full disk stops.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_KEPT = 10_000
"""Lines kept in memory while they cannot be written; beyond that the oldest go."""

TAIL_BYTES = 1 << 20
"""What is read of a file for its last line."""


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every line that is not blank; the value of a line that is not JSON is None.

    Nothing where there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):  # includes bytes cut inside a character
            yield number, None


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, in order; every other line is passed over. Empty where there is no file."""
    return [value for _, value in read_lines(path) if isinstance(value, dict)]


def last_object(path: Path) -> dict[str, Any] | None:
    """The last JSON object among the file's last ``TAIL_BYTES``; None where there is none. Reads no more than these."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None


def append_lines(path: Path, lines: Sequence[str], durable: bool = False) -> None:
    """Append whole lines or nothing: what a failed write left behind is cut off again.

    A line torn by a crash (no newline at the end of the file) is closed first, so that it spoils no other.

    Args:
        path: the file; it and its folder need not exist.
        lines: without their newlines.
        durable: return only when the disk has them.

    Raises:
        OSError: they could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + "".join(f"{line}\n" for line in lines).encode()
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineWriter:
    """Appends lines to a file. Those that cannot be written are kept and written when they can be; never raises.

    Args:
        path: the file.
        warn: told once when writing fails, and once when it works again.
        durable: every line is on the disk when ``add`` returns.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], durable: bool = False) -> None:
        self._path, self._warn, self._durable = path, warn, durable
        self._kept: deque[str] = deque(maxlen=MOST_KEPT)
        self._num_dropped = 0
        self._failing = False

    def add(self, line: str) -> None:
        """One more line, after those that wait."""
        self._num_dropped += len(self._kept) == MOST_KEPT
        self._kept.append(line)
        self._write(self._durable)

    def sync(self) -> None:
        """Makes the lines durable, where the disk lets it."""
        self._write(durable=True)

    def close(self) -> None:
        """A last try; says how many lines are lost."""
        if self._kept:
            self._write(durable=True)
        if self._kept:
            self._warn(
                f"{self._path} could not be written; lines lost: {len(self._kept) + self._num_dropped}"
            )

    def _write(self, durable: bool) -> None:
        waiting = list(self._kept)
        try:
            append_lines(self._path, waiting, durable)
        except OSError as error:
            if not self._failing:
                self._warn(
                    f"{self._path}: {error.strerror or error}. Training goes on; up to {MOST_KEPT} lines wait in "
                    "memory until they can be written: make room"
                )
            self._failing = True
            return
        self._kept.clear()
        if self._failing:
            dropped = f", {self._num_dropped} older ones are lost" if self._num_dropped else ""
            self._warn(
                f"{self._path} can be written again: {len(waiting)} lines that waited are there{dropped}"
            )
        self._failing, self._num_dropped = False, 0
