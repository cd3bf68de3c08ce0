"""The compressed form of a shard: zstd frames of whole rows with a seek table, half the size, random-access.

``<name>.shard.zst`` = a skippable frame with the shard's header page; one zstd frame per ``rows_per_frame``
sequences; a skippable frame with the frame offsets. Every standard zstd tool can decompress it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from calm_scale.config.files import new_file
from data_prep.errors import ShardError
from data_prep.shards import (
    HEADER_BYTES,
    MAGIC,
    SUFFIX,
    ShardHeader,
    map_tokens,
    parse_header,
    read_header,
)
from data_prep.shards.manifest import FolderLock, Manifest, ShardEntry

COMPRESSED_SUFFIX = ".zst"
_SKIPPABLE = struct.Struct("<II")
_TAIL = struct.Struct("<QQ8s")  # rows per frame, offset of the table, magic
_SKIPPABLE_MAGIC = 0x184D2A50
_FRAME_BYTES = 1 << 20
_REMEDY = "copy it again, or prepare again with --restart"


_Pieces = Iterator[NDArray[np.unsignedinteger]]


def compress_split(split_dir: Path, *, level: int = 3) -> Manifest:
    """Replace every shard of a split by its compressed form and say so in the manifest (written last).

    Interrupted, it goes on when run again: a shard is removed only after the new manifest stands, and one that no
    manifest names is removed then.

    Raises:
        PrepError: another command is writing the data folder.
        ShardError: a shard is damaged; nothing was replaced.
    """
    return _convert(split_dir, True, lambda source, target, entry: _compress(source, target, entry, level))


def expand_split(split_dir: Path) -> Manifest:
    """The reverse: plain shards with the bytes they had, checked against their checksums.

    Raises:
        PrepError: another command is writing the data folder.
        ShardError: a shard is damaged; nothing was replaced.
    """
    return _convert(split_dir, False, _expand)


def _convert(split_dir: Path, compressed: bool, write: Callable[[Path, Path, ShardEntry], None]) -> Manifest:
    Manifest.read(split_dir)  # a folder that is no split gets no lock
    with FolderLock(split_dir.resolve().parent):
        old = Manifest.read(split_dir)
        new = old.model_copy(update={"shards": [_in_form(entry, compressed) for entry in old.shards]})
        written: list[Path] = []
        try:
            for entry, wanted in zip(old.shards, new.shards, strict=True):
                if entry != wanted:
                    write(split_dir / entry.name, split_dir / wanted.name, entry)
                    written.append(split_dir / wanted.name)
                elif (split_dir / _in_form(entry, not compressed).name).exists():
                    _refuse_damaged(split_dir / entry.name, entry)  # the other form may be the only good one
            if written:
                new.write(split_dir)
        except BaseException:
            _remove_unnamed(written, Manifest.read(split_dir))
            raise
        remove_unnamed(split_dir, new)
    return new


def _in_form(entry: ShardEntry, compressed: bool) -> ShardEntry:
    name = entry.name.removesuffix(COMPRESSED_SUFFIX) + (COMPRESSED_SUFFIX if compressed else "")
    return entry.model_copy(update={"name": name, "compressed": compressed})


def remove_unnamed(split_dir: Path, manifest: Manifest) -> None:
    """Remove the shards of a split that its manifest does not name, and partial shards, which no manifest names."""
    patterns = (f"*{SUFFIX}", f"*{SUFFIX}{COMPRESSED_SUFFIX}", "*.part")
    _remove_unnamed([path for pattern in patterns for path in split_dir.glob(pattern)], manifest)


def _remove_unnamed(paths: list[Path], manifest: Manifest) -> None:
    named = {entry.name for entry in manifest.shards}
    for path in paths:
        if path.name not in named:
            path.unlink(missing_ok=True)


def _compress(source: Path, target: Path, entry: ShardEntry, level: int) -> None:
    header = read_header(source)
    rows = map_tokens(source, header)
    per_frame = _rows_per_frame(header)
    packer = zstandard.ZstdCompressor(level=level, write_checksum=True)
    offsets = []
    with new_file(target) as file:
        file.write(_SKIPPABLE.pack(_SKIPPABLE_MAGIC, HEADER_BYTES) + header.pack())
        frames = (rows[start : start + per_frame] for start in range(0, header.num_sequences, per_frame))
        for frame in _checked(source, entry, header, frames):
            offsets.append(file.tell())
            file.write(packer.compress(frame.tobytes()))
        table_at = file.tell()
        table = np.asarray([*offsets, table_at], "<u8").tobytes() + _TAIL.pack(per_frame, table_at, MAGIC)
        file.write(_SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(table)) + table)


def _expand(source: Path, target: Path, entry: ShardEntry) -> None:
    header, pieces = open_compressed(source)
    with new_file(target) as file:
        file.write(header.pack())
        for piece in _checked(source, entry, header, pieces):
            file.write(piece.tobytes())


def _refuse_damaged(path: Path, entry: ShardEntry) -> None:
    if entry.compressed:
        header, pieces = open_compressed(path)
    else:
        header = read_header(path)
        pieces = iter(map_tokens(path, header))
    for _ in _checked(path, entry, header, pieces):
        pass


def _checked(path: Path, entry: ShardEntry, header: ShardHeader, pieces: _Pieces) -> _Pieces:
    """The pieces of a shard, one after the other.

    Raises:
        ShardError: it is not its manifest's (before the first), or its ids do not fit the checksum (after the last).
    """
    if (f"{header.checksum:016x}", header.num_sequences) != (entry.checksum, entry.num_sequences):
        raise ShardError(f"{path} does not belong to its manifest; {_REMEDY}. No shard was replaced")
    digest = xxhash.xxh64()
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
        yield piece
    if digest.intdigest() != header.checksum:
        raise ShardError(
            f"{path} is damaged: its tokens do not fit their checksum; {_REMEDY}. No shard was replaced"
        )


def open_compressed(path: Path) -> tuple[ShardHeader, Iterator[NDArray[np.unsignedinteger]]]:
    """Header and token ids of a compressed shard, frame by frame."""
    shard = CompressedShard(path)
    return shard.header, (shard.frame(i).reshape(-1) for i in range(shard.num_frames))


class CompressedShard:
    """Random access to the rows of a compressed shard; the frame read last is kept.

    Raises:
        ShardError: missing, cut or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError):
            raise ShardError(f"shard {path} is missing or empty; {_REMEDY}") from None
        self._data, self.num_bytes = data, len(data)
        first = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, HEADER_BYTES)
        shortest = len(first) + HEADER_BYTES + _SKIPPABLE.size + _TAIL.size
        if len(data) < shortest or bytes(data[-8:]) != MAGIC or bytes(data[: len(first)]) != first:
            raise ShardError(f"{path} is not a complete compressed shard: it was cut or changed; {_REMEDY}")
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
