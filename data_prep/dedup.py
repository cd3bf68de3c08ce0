"""Exact deduplication: of documents with the same content, the first in corpus order stays.

Pass one writes a 128-bit hash per document and segment. One process then finds the repeats, a range of hash
values at a time, and writes for each segment the ordinals to leave out. Pass two encodes the rest. The result
depends on the corpus alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from calm_scale.config.files import write_atomically
from data_prep.journal import Journal

_ROWS_AT_ONCE = 8 << 20


class HashFile:
    """Hashes uint64 [n, 2] of one segment; row 0 of the file: whether it is the last, whether the input is corrupt."""

    def __init__(self, journal: Journal, item: int, segment: int) -> None:
        self.path = journal.record_path(item, segment).with_suffix(".hashes.npy")

    def write(self, hashes: NDArray[np.uint64], *, last: bool, corrupt: bool = False) -> None:
        """Write in one atomic step."""
        part = self.path.with_name(self.path.name + ".part")
        with part.open("wb") as file:
            np.save(file, np.concatenate([np.array([[last, corrupt]], np.uint64), hashes]))
        part.replace(self.path)

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
        part = self.path.with_name(self.path.name + ".part")
        with part.open("wb") as file:
            np.save(file, ordinals)
        part.replace(self.path)


def find_duplicates(journal: Journal, num_inputs: int) -> int:
    """Write every segment's drop list from the hash files; the number of documents dropped."""
    done = journal.root / "records" / "duplicates-found"
    if done.exists():
        return int(done.read_text())
    files = list(_hash_files(journal, num_inputs))
    sizes = [len(file.rows()) for _, file in files]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num_ranges = max(1, -(-int(starts[-1]) // _ROWS_AT_ONCE))
    repeats = [_repeats(files, starts, number, num_ranges) for number in range(num_ranges)]
    dropped = np.sort(np.concatenate(repeats)) if repeats else np.empty(0, np.int64)
    for ((item, segment), _), start, stop in zip(files, starts, starts[1:], strict=False):
        mine = dropped[np.searchsorted(dropped, start) : np.searchsorted(dropped, stop)] - start
        if len(mine):
            DropList(journal, item, segment).write(mine)
    write_atomically(done, str(len(dropped)))
    return len(dropped)


def _hash_files(journal: Journal, num_inputs: int) -> Iterator[tuple[tuple[int, int], HashFile]]:
    """Of every input that is used: a document repeats only what is kept."""
    for item in range(num_inputs):
        if any(file.corrupt() for file in _all_of(journal, item)):
            continue
        segment = 0
        while (last := (file := HashFile(journal, item, segment)).last()) is not None:
            yield (item, segment), file
            if last:
                break
            segment += 1


def _all_of(journal: Journal, item: int) -> Iterator[HashFile]:
    for path in journal.root.glob(f"records/{item:06d}-*.hashes.npy"):
        yield HashFile(journal, item, int(path.name[7:].split(".")[0]))


def _repeats(
    files: list[tuple[tuple[int, int], HashFile]], starts: NDArray[np.int64], number: int, num_ranges: int
) -> NDArray[np.int64]:
    """Positions (in corpus order) of documents in one range of hash values that were there before."""
    hashes, positions = [], []
    for (_, file), start in zip(files, starts, strict=False):
        rows = file.rows()
        mine = np.flatnonzero(rows[:, 0] % np.uint64(num_ranges) == number)
        hashes.append(np.asarray(rows[mine]))
        positions.append(mine + start)
    if not hashes:
        return np.empty(0, np.int64)
    keys, where = np.concatenate(hashes), np.concatenate(positions)
    order = np.lexsort((where, keys[:, 1], keys[:, 0]))
    keys, where = keys[order], where[order]
    return np.asarray(where[1:][(keys[1:] == keys[:-1]).all(axis=1)], np.int64)
