"""The cold form of a shard: zstd frames of whole rows with a seek table, about half the size, still random-access.

``<name>.shard.zst`` = a skippable frame with the shard's header page; one zstd frame per ``rows_per_frame``
sequences; a skippable frame with the frame offsets. Every standard zstd tool can decompress it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from data_prep.errors import ShardError
from data_prep.manifest import Manifest, ShardEntry
from data_prep.shards import (
    HEADER_BYTES,
    MAGIC,
    ShardHeader,
    checksum_of,
    map_tokens,
    parse_header,
    read_header,
)

COLD_SUFFIX = ".zst"
_SKIPPABLE = struct.Struct("<II")
_TAIL = struct.Struct("<QQ8s")  # rows per frame, offset of the table, magic
_SKIPPABLE_MAGIC = 0x184D2A50
_FRAME_BYTES = 1 << 20
_REMEDY = "copy it again, or prepare again with --restart"


def compress_split(split_dir: Path, *, level: int = 3) -> Manifest:
    """Replace every shard of a split by its cold form and say so in the manifest (written last).

    Interrupted, it goes on when run again: a shard is removed only after the new manifest stands.
    """
    manifest = Manifest.read(split_dir)
    shards = []
    for entry in manifest.shards:
        if entry.compressed:
            shards.append(entry)
            continue
        _compress(split_dir / entry.name, split_dir / (entry.name + COLD_SUFFIX), level)
        shards.append(entry.model_copy(update={"name": entry.name + COLD_SUFFIX, "compressed": True}))
    return _replace(split_dir, manifest, shards)


def expand_split(split_dir: Path) -> Manifest:
    """The reverse: plain shards with the bytes they had, checked against their checksums."""
    manifest = Manifest.read(split_dir)
    shards = []
    for entry in manifest.shards:
        if not entry.compressed:
            shards.append(entry)
            continue
        plain = split_dir / entry.name.removesuffix(COLD_SUFFIX)
        _expand(split_dir / entry.name, plain)
        shards.append(entry.model_copy(update={"name": plain.name, "compressed": False}))
    return _replace(split_dir, manifest, shards)


def _replace(split_dir: Path, old: Manifest, shards: list[ShardEntry]) -> Manifest:
    new = old.model_copy(update={"shards": shards})
    new.write(split_dir)
    for entry in {s.name for s in old.shards} - {s.name for s in shards}:
        (split_dir / entry).unlink(missing_ok=True)
    return new


def _compress(source: Path, target: Path, level: int) -> None:
    header = read_header(source)
    rows = map_tokens(source, header)
    per_frame = _rows_per_frame(header)
    packer = zstandard.ZstdCompressor(level=level, write_checksum=True)
    part = target.with_name(target.name + ".part")
    offsets = []
    with part.open("wb") as file:
        file.write(_SKIPPABLE.pack(_SKIPPABLE_MAGIC, HEADER_BYTES) + header.pack())
        for start in range(0, header.num_sequences, per_frame):
            offsets.append(file.tell())
            file.write(packer.compress(np.ascontiguousarray(rows[start : start + per_frame]).tobytes()))
        table_at = file.tell()
        table = np.asarray([*offsets, table_at], "<u8").tobytes() + _TAIL.pack(per_frame, table_at, MAGIC)
        file.write(_SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(table)) + table)
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)


def _expand(source: Path, target: Path) -> None:
    header, pieces = open_cold(source)
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        file.write(header.pack())
        for piece in pieces:
            file.write(piece.tobytes())
        file.flush()
        os.fsync(file.fileno())
    if checksum_of(part) != header.checksum:
        part.unlink()
        raise ShardError(f"{source} is damaged: what it expands to does not fit its checksum")
    part.replace(target)


def open_cold(path: Path) -> tuple[ShardHeader, Iterator[NDArray[np.unsignedinteger]]]:
    """Header and token ids of a cold shard, frame by frame."""
    shard = ColdShard(path)
    return shard.header, (shard.frame(i).reshape(-1) for i in range(shard.num_frames))


class ColdShard:
    """Random access to the rows of a cold shard; the frame read last is kept.

    Raises:
        ShardError: missing, cut or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError):
            raise ShardError(f"shard {path} is missing or empty; {_REMEDY}") from None
        self._data = data
        first = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, HEADER_BYTES)
        shortest = len(first) + HEADER_BYTES + _SKIPPABLE.size + _TAIL.size
        if len(data) < shortest or bytes(data[-8:]) != MAGIC or bytes(data[: len(first)]) != first:
            raise ShardError(f"{path} is no complete cold shard: it was cut or changed; {_REMEDY}")
        self.header = parse_header(bytes(data[len(first) : len(first) + HEADER_BYTES]), path)
        self._per_frame, self._offsets = _read_table(data, self.header, path)
        self.num_frames = len(self._offsets) - 1
        self._kept: tuple[int, NDArray[np.unsignedinteger]] | None = None

    def frame(self, number: int) -> NDArray[np.unsignedinteger]:
        """Rows [≤ rows_per_frame, sequence_length] of one frame."""
        if self._kept is None or self._kept[0] != number:
            self._kept = (number, self._unpack(number))
        return self._kept[1]

    def _unpack(self, number: int) -> NDArray[np.unsignedinteger]:
        header = self.header
        num_rows = min(self._per_frame, header.num_sequences - number * self._per_frame)
        num_bytes = num_rows * header.sequence_length * header.dtype.itemsize
        packed = self._data[self._offsets[number] : self._offsets[number + 1]].tobytes()
        try:
            if (found := zstandard.frame_content_size(packed)) != num_bytes:
                raise zstandard.ZstdError(f"it holds {found} bytes, {num_bytes} belong there")
            plain = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ShardError(f"{self.path} is damaged (frame {number}: {error}); {_REMEDY}") from None
        return np.frombuffer(plain, header.dtype).reshape(num_rows, header.sequence_length)

    def sample(self, index: int, tokens_per_sample: int) -> NDArray[np.unsignedinteger]:
        """Sample ``index`` of ``tokens_per_sample`` tokens (a divisor of sequence_length)."""
        row, part = divmod(index, self.header.sequence_length // tokens_per_sample)
        frame, inside = divmod(row, self._per_frame)
        start = part * tokens_per_sample
        return self.frame(frame)[inside, start : start + tokens_per_sample]


def _rows_per_frame(header: ShardHeader) -> int:
    return max(1, _FRAME_BYTES // max(1, header.sequence_length * header.dtype.itemsize))


def _read_table(data: NDArray[np.uint8], header: ShardHeader, path: Path) -> tuple[int, list[int]]:
    """Rows per frame, and where each frame begins and the last one ends.

    Raises:
        ShardError: that cannot be the table of a file of this size with this header.
    """
    per_frame, table_at, _ = _TAIL.unpack(bytes(data[-_TAIL.size :]))
    if 1 <= per_frame <= _rows_per_frame(header):
        num_offsets = -(-header.num_sequences // per_frame) + 1
        start = len(data) - _TAIL.size - num_offsets * 8
        if start - _SKIPPABLE.size == table_at:
            mark = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(data) - start)
            offsets = np.frombuffer(bytes(data[start : -_TAIL.size]), "<u8")
            ends = (int(offsets[0]), int(offsets[-1]))
            fits = ends == (_SKIPPABLE.size + HEADER_BYTES, table_at) and (offsets[1:] > offsets[:-1]).all()
            if fits and bytes(data[table_at:start]) == mark:
                return per_frame, offsets.tolist()
    raise ShardError(f"{path} is damaged: its table of frames does not fit the rest of it; {_REMEDY}")
