"""Reading shards: memory-mapped and checked when opened; whole batches are gathered with one numpy call."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from calm_scale.config.files import wait_until_visible
from data_prep.errors import ShardError
from data_prep.shards import HEADER_BYTES, ShardHeader, map_tokens, read_header
from data_prep.shards.compressed import CompressedShard, open_compressed
from data_prep.shards.manifest import Manifest, ShardEntry
from data_prep.shards.order import MixtureOrder, SampleOrder

_IDS_AT_ONCE = 1 << 22


class ShardDataset:
    """The samples of one split, in stored order.

    ``ds[i]`` is a read-only view ``[tokens_per_sample]`` of the page cache; no token is copied. ``gather`` copies a
    batch. Every shard's header and size is checked against the manifest when the dataset is opened (checksums:
    ``prep verify``), or, where another process has done that (``seen``), a shard's when the first of its samples is
    read. A sample with an id that was never written raises ShardError when it is read.

    Ids that only fill up a stored last sequence (``ShardEntry.filler``) are never served. Whole samples are by
    default; ``partial`` adds, at each end of such a shard, the shorter sample ``[1 ≤ n < tokens_per_sample]`` that
    is left, for an evaluation that drops nothing.

    Args:
        split_dir: folder with ``manifest.json`` and the shards.
        tokens_per_sample: must divide the manifest's sequence_length (a stored sequence of 8192 tokens serves
            as 4 samples of 2048).
        partial: serve the last, shorter samples too.
        seen: the manifest and ``num_bytes``, as another process found them: no file is looked at before it is read.

    Attributes:
        num_bytes: size of all shards on the disk.

    Raises:
        ShardError: the split is incomplete, a shard is missing or changed, or the sample size does not fit.
    """

    def __init__(
        self,
        split_dir: Path,
        tokens_per_sample: int,
        *,
        partial: bool = False,
        seen: tuple[Manifest, int] | None = None,
    ) -> None:
        self.split_dir = Path(split_dir)
        self.manifest = Manifest.read(self.split_dir) if seen is None else seen[0]
        self.fingerprint = self.manifest.fingerprint
        length = self.manifest.sequence_length
        if tokens_per_sample < 1 or length % tokens_per_sample:
            raise ShardError(
                f"{self.split_dir} stores sequences of {length} tokens; samples of {tokens_per_sample} tokens "
                f"do not divide them: choose a divisor of {length}, or prepare the data with another "
                "prep.sequence_length",
                mistake=True,
            )
        self.tokens_per_sample = tokens_per_sample
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._unchecked = seen is not None
        self.num_bytes = sum(map(self._check_shard, self.manifest.shards)) if seen is None else seen[1]
        self.partial = partial
        self._counts = [self._count_samples(entry) for entry in self.manifest.shards]
        self._starts = [0, *accumulate(self._counts)]
        self._row_starts = np.array(self._starts)
        self._opened: list[_Samples | None] = [None] * len(self.manifest.shards)
        self._gatherer: _RowGatherer | None = None

    def __len__(self) -> int:
        """Samples in the split."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> NDArray[np.unsignedinteger]:
        """Sample ``index`` as a read-only view [tokens_per_sample] of uint16 or uint32 ids (a partial one: shorter)."""
        sample = self._read_filled(index)
        if not self.partial:
            return sample
        shard = self._find_shard(index)
        if index == self._starts[shard + 1] - 1:
            real = self._count_real_tokens(self.manifest.shards[shard])
            return sample[: (real - 1) % self.tokens_per_sample + 1]
        return sample

    def gather(self, indices: NDArray[np.integer], dtype: DTypeLike | None = None) -> NDArray[np.integer]:
        """Copy samples ``indices`` [n] into one array [n, tokens_per_sample] (of the stored type by default).

        A partial sample comes with the filler that follows it.

        Raises:
            IndexError: there is no such sample.
            ShardError: the split has no sample at all, a shard is missing or changed, or a sample holds an id that was
                never written.
        """
        wanted = np.ascontiguousarray(indices, np.int64)
        if not len(wanted):
            return np.empty((0, self.tokens_per_sample), self._dtype if dtype is None else dtype)
        self.refuse_none()
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"samples {wanted.min()}…{wanted.max()} are not all inside [0, {len(self)})")
        if any(entry.compressed for entry in self.manifest.shards):
            samples = np.stack([self._read_filled(index) for index in wanted.tolist()])
        else:
            samples = self._gather_mapped(wanted)
        return samples if dtype is None else samples.astype(dtype)

    def refuse_none(self) -> None:
        """Raises ShardError when there is nothing to read."""
        if not len(self):
            found = sum(map(self._count_real_tokens, self.manifest.shards))
            raise ShardError(
                f"{self.split_dir} has no sample of {self.tokens_per_sample} tokens: it holds {found}; choose "
                "smaller samples, or prepare a larger split",
                mistake=True,
            )

    def order(self, seed: int) -> SampleOrder | MixtureOrder:
        """The stream of sample indices for training: by size, or by the sources' weights where they differ."""
        given = [0] * len(self.manifest.sources)
        for entry, count in zip(self.manifest.shards, self._counts, strict=True):
            given[entry.source] += count
        weights = [s.weight for s, count in zip(self.manifest.sources, given, strict=True) if count]
        if len(set(weights)) <= 1:
            return SampleOrder(len(self), seed)
        return MixtureOrder([count for count in given if count], weights, seed)

    def shard_of(self, index: int) -> ShardEntry:
        """The manifest's entry of the shard that holds sample ``index``."""
        return self.manifest.shards[self._find_shard(index)]

    def __getstate__(self) -> dict[str, Any]:
        """Maps are reopened in another process, not sent to it."""
        return {**self.__dict__, "_opened": [None] * len(self._opened), "_gatherer": None}

    def _find_shard(self, index: int) -> int:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"sample {index} is outside [0, {len(self)})")
        return bisect_right(self._starts, index) - 1

    def _read_filled(self, index: int) -> NDArray[np.unsignedinteger]:
        """Sample ``index``; a partial one with its filler."""
        shard = self._find_shard(index)
        samples = self._open(shard)
        sample: NDArray[np.unsignedinteger] = samples[index - self._starts[shard]]
        if sample.max() > self.manifest.max_id:
            raise ShardError(
                f"{self.split_dir / self.manifest.shards[shard].name} is damaged: its sample {index} holds id "
                f"{sample.max()}, the largest that was written is {self.manifest.max_id}; run "
                "`calm-scale prep verify`, and prepare again with --restart"
            )
        return sample

    def _gather_mapped(self, wanted: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Samples ``wanted`` of shards that are not compressed. Several threads may call this."""
        shards = self._row_starts.searchsorted(wanted, "right") - 1
        gatherer = self._gatherer
        if gatherer is None or not gatherer.has_all(shards):
            for shard in np.unique(shards).tolist():
                self._open(shard)
            maps = {i: samples for i, samples in enumerate(self._opened) if isinstance(samples, np.ndarray)}
            gatherer = self._gatherer = _RowGatherer(maps, self._row_starts)
        samples = gatherer.take(wanted, shards)
        if samples.max() > self.manifest.max_id:
            for index in wanted.tolist():
                self._read_filled(index)
        return samples

    def _count_samples(self, entry: ShardEntry) -> int:
        """Samples of a shard that hold text; whole ones only, unless partial ones are served."""
        filled_up = self.partial * (self.tokens_per_sample - 1)
        return (self._count_real_tokens(entry) + filled_up) // self.tokens_per_sample

    def _count_real_tokens(self, entry: ShardEntry) -> int:
        """Ids of a shard that are no filler."""
        return entry.num_sequences * self.manifest.sequence_length - entry.filler

    def _check_shard(self, entry: ShardEntry) -> int:
        """The shard's bytes on the disk, if its header is the manifest's."""
        path = self.split_dir / entry.name
        if entry.compressed:
            shard = CompressedShard(path)
            header, num_bytes = shard.header, shard.num_bytes
        else:
            header = read_header(path)
            num_bytes = header.file_bytes
        differences = compare_header(self.manifest, entry, header)
        if differences:
            raise ShardError(
                f"shard {entry.name} does not belong to its manifest: {differences[0]}; prepare again with "
                "`calm-scale prep --restart`"
            )
        if header.max_id >= self.manifest.vocab_size:
            raise ShardError(
                f"shard {entry.name} holds id {header.max_id}, the vocabulary has {self.manifest.vocab_size} rows"
            )
        return num_bytes

    def _open(self, shard: int) -> _Samples:
        samples = self._opened[shard]
        if samples is not None:
            return samples
        entry = self.manifest.shards[shard]
        path = self.split_dir / entry.name
        if self._unchecked:
            wait_until_visible(lambda: "" if path.exists() else str(path))
            self._check_shard(entry)
        if entry.compressed:
            samples = _CompressedSamples(CompressedShard(path), self.tokens_per_sample)
        else:
            shape = (self._counts[shard], self.tokens_per_sample)
            samples = np.memmap(path, self._dtype, "r", offset=HEADER_BYTES, shape=shape).view(np.ndarray)
        self._opened[shard] = samples
        return samples


class _CompressedSamples:
    """A compressed shard as a sequence of samples (decompressed a frame at a time)."""

    def __init__(self, shard: CompressedShard, tokens_per_sample: int) -> None:
        self._shard, self._tokens = shard, tokens_per_sample

    def __getitem__(self, index: int) -> NDArray[np.unsignedinteger]:
        return self._shard.sample(index, self._tokens)


_Samples = NDArray[np.unsignedinteger] | _CompressedSamples


class _RowGatherer:
    """Copies rows out of many memory maps with one numpy call.

    A loop over samples costs about as much in Python as copying a sample does. All maps live in one address space,
    so a single strided view that starts at the lowest of them reaches every row: row i of the split, in map m, begins
    i · per_row + shift_m units after the lowest address.

    Args:
        maps: by shard, arrays [n, width] of one type, each C-contiguous; they are held as long as the view.
        starts: row of the split at which each shard begins.
    """

    def __init__(self, maps: dict[int, NDArray[np.unsignedinteger]], starts: NDArray[np.int64]) -> None:
        self._maps = maps
        shards = np.array(list(maps))
        addresses = np.array([m.ctypes.data for m in maps.values()], np.int64)
        lowest = maps[int(shards[addresses.argmin()])]
        apart = addresses - addresses.min()
        width, itemsize = lowest.shape[1], lowest.itemsize
        unit = math.gcd(width * itemsize, *apart.tolist())
        self._per_row = width * itemsize // unit
        self._mapped = np.zeros(len(starts) - 1, bool)
        self._mapped[shards] = True
        self._shifts = np.zeros(len(starts) - 1, np.int64)
        self._shifts[shards] = apart // unit - starts[shards] * self._per_row
        last_rows = np.array([len(m) - 1 for m in maps.values()]) * self._per_row
        last = int((apart // unit + last_rows).max())
        self._rows = as_strided(lowest, (last + 1, width), (unit, itemsize), writeable=False)

    def has_all(self, shards: NDArray[np.int64]) -> bool:
        """Whether every one of ``shards`` is mapped."""
        return bool(self._mapped[shards].all())

    def take(self, rows: NDArray[np.int64], shards: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Copies of ``rows`` [n] of the split, which lie in the mapped ``shards`` [n]: [n, width].

        The view reaches beyond the maps; the caller has checked that the rows exist.
        """
        found: NDArray[np.unsignedinteger] = self._rows[rows * self._per_row + self._shifts[shards]]
        return found


def find_shard_problems(split_dir: Path, manifest: Manifest, entry: ShardEntry) -> list[str]:
    """What is wrong with one shard: reads all of it, in pieces."""
    try:
        return _check_content(split_dir / entry.name, manifest, entry)
    except (ShardError, OSError) as error:
        return [str(error)]


def _check_content(path: Path, manifest: Manifest, entry: ShardEntry) -> list[str]:
    if entry.compressed:
        header, pieces = open_compressed(path)
    else:
        header = read_header(path)
        flat = map_tokens(path, header).reshape(-1)
        pieces = (np.asarray(flat[i : i + _IDS_AT_ONCE]) for i in range(0, len(flat), _IDS_AT_ONCE))
    problems = [f"{entry.name}: {difference}" for difference in compare_header(manifest, entry, header)]
    digest = xxhash.xxh64()
    largest = count = 0
    for piece in pieces:
        digest.update(piece.view(np.uint8).data)
        largest = max(largest, int(piece.max()))
        count += len(piece)
    if digest.intdigest() != header.checksum:
        problems.append(
            f"{path}: its tokens do not fit their checksum: the file is damaged, prepare again with --restart"
        )
    if largest != header.max_id or count != header.num_tokens:
        problems.append(
            f"{path}: largest id {largest} of {count} ids, the header says {header.max_id} of {header.num_tokens}"
        )
    return problems


def compare_header(manifest: Manifest, entry: ShardEntry, header: ShardHeader) -> list[str]:
    """What a shard's header and its manifest say differently."""
    stated = {
        "dtype": (header.dtype.name, manifest.dtype),
        "alignment": (header.alignment, manifest.alignment),
        "sequence_length": (header.sequence_length, manifest.sequence_length),
        "num_sequences": (header.num_sequences, entry.num_sequences),
        "checksum": (f"{header.checksum:016x}", entry.checksum),
        "max_id": (header.max_id, entry.max_id),
    }
    return [f"{name} is {a}, the manifest says {b}" for name, (a, b) in stated.items() if a != b]
