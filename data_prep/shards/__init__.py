"""The shard format: one page of header, then the token ids of whole sequences, little-endian.

====== ========= ====================================================
offset type      field
====== ========= ====================================================
0      8 bytes   magic ``CALMSHRD``
8      uint32    version (1)
12     uint32    bytes per token id: 2 (uint16) or 4 (uint32)
16     uint64    alignment: every patch size K that divides it may read this shard
24     uint64    sequence_length, tokens
32     uint64    num_sequences
40     uint64    largest token id stored
48     uint64    xxh64 of the token bytes
56     uint64    xxh64 of header bytes 0–55
4096   tokens    num_sequences · sequence_length ids
====== ========= ====================================================

The tokens start on a page boundary, so a memory map of them is aligned. A file with the final name is
complete: it is written as ``.part``, fsynced, then renamed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.errors import (
    DISK_FULL,
    DiskFullError,
    ShardError,
    describe_full_disk,
)

MAGIC = b"CALMSHRD"
VERSION = 1
HEADER_BYTES = 4096
SUFFIX = ".shard"
_FIELDS = struct.Struct("<8sIIQQQQQ")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself. ``checksum`` is the xxh64 of the token bytes."""

    dtype: np.dtype[np.unsignedinteger]
    alignment: int
    sequence_length: int
    num_sequences: int
    max_id: int
    checksum: int

    def pack(self) -> bytes:
        """The header page, ``HEADER_BYTES`` long."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.dtype.itemsize,
            self.alignment,
            self.sequence_length,
            self.num_sequences,
            self.max_id,
            self.checksum,
        )
        return (fields + _CHECK.pack(xxhash.xxh64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")

    @property
    def num_tokens(self) -> int:
        """Token ids in the shard."""
        return self.num_sequences * self.sequence_length

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + self.num_tokens * self.dtype.itemsize


def token_dtype(max_id: int, wanted: str = "auto") -> np.dtype[np.unsignedinteger]:
    """The narrowest of uint16 and uint32 that holds every id the tokenizer can emit.

    Raises:
        ShardError: ``wanted`` is uint16 and ``max_id`` does not fit it.
    """
    if wanted == "uint16" and max_id > 0xFFFF:
        raise ShardError(
            f"prep.dtype is uint16, but the tokenizer's largest id is {max_id} (> 65535): ids would wrap; "
            "use dtype: auto or uint32",
            mistake=True,
        )
    narrow = wanted == "uint16" or (wanted == "auto" and max_id <= 0xFFFF)
    return np.dtype("<u2") if narrow else np.dtype("<u4")


def read_header(path: Path) -> ShardHeader:
    """Read and check a shard's header and its file size.

    Raises:
        ShardError: missing, not a shard, of another version, damaged, or cut.
    """
    try:
        with path.open("rb") as file:
            page = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ShardError(f"shard {path} is missing; copy it again, or prepare again with --restart") from None
    header = parse_header(page, path)
    if size != header.file_bytes:
        raise ShardError(
            f"{path} has {size} bytes, its header says {header.file_bytes}: it was cut or changed"
        )
    return header


def parse_header(page: bytes, path: Path) -> ShardHeader:
    """Decode a header page; ``path`` is for the message.

    Raises:
        ShardError: not a shard, of another version, or damaged.
    """
    if len(page) < HEADER_BYTES or page[:8] != MAGIC:
        raise ShardError(f"{path} is not a calm-scale shard (no {MAGIC.decode()} header)")
    _, version, width, alignment, length, count, max_id, checksum = _FIELDS.unpack_from(page)
    if version != VERSION:
        raise ShardError(f"{path} has shard format {version}; this build reads format {VERSION}")
    if _CHECK.unpack_from(page, _FIELDS.size)[0] != xxhash.xxh64_intdigest(page[: _FIELDS.size]):
        raise ShardError(f"the header of {path} is damaged; copy it again, or prepare again with --restart")
    if width not in (2, 4):
        raise ShardError(f"{path} stores {width} bytes per id; 2 or 4 are known")
    return ShardHeader(np.dtype(f"<u{width}"), alignment, length, count, max_id, checksum)


def map_tokens(path: Path, header: ShardHeader) -> NDArray[np.unsignedinteger]:
    """Read-only memory map ``[num_sequences, sequence_length]`` of a shard's ids."""
    shape = (header.num_sequences, header.sequence_length)
    return np.memmap(path, dtype=header.dtype, mode="r", offset=HEADER_BYTES, shape=shape)


def checksum_of(path: Path, piece_bytes: int = 1 << 22) -> int:
    """xxh64 of a shard's token bytes, read in pieces."""
    digest = xxhash.xxh64()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while piece := file.read(piece_bytes):
            digest.update(piece)
    return digest.intdigest()


class ShardWriter:
    """Writes a stream of ids as whole sequences; what is left over at the end is the *tail*.

    >>> writer = ShardWriter(path, np.dtype("<u4"), alignment=8, sequence_length=8192, max_id=128_255)
    >>> writer.append(ids)          # any number of ids, any number of times
    >>> header, tail = writer.close()

    ``tag`` distinguishes the temporary files of writers that may meet at one path.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[np.unsignedinteger],
        *,
        alignment: int,
        sequence_length: int,
        max_id: int,
        tag: str = "",
    ) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}{tag}.part")
        self._dtype, self._alignment, self._length, self._limit = dtype, alignment, sequence_length, max_id
        self._carry: NDArray[np.unsignedinteger] = np.empty(0, dtype)
        self._digest = xxhash.xxh64()
        self._num_sequences = 0
        self._max_seen = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb", buffering=0)
        self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: NDArray[np.unsignedinteger]) -> None:
        """Append ids ``[n]``.

        Raises:
            ShardError: an id is above ``max_id`` or does not fit the stored type.
        """
        if not len(ids):
            return
        largest = int(ids.max())
        if largest > self._limit or largest > np.iinfo(self._dtype).max:
            raise ShardError(
                f"token id {largest} does not fit {self.path.name}: the largest allowed is "
                f"{min(self._limit, int(np.iinfo(self._dtype).max))}; the tokenizer and the vocabulary differ"
            )
        ids = ids.astype(self._dtype, copy=False)
        if len(self._carry):
            missing = self._length - len(self._carry)
            self._carry = np.concatenate([self._carry, ids[:missing]])
            ids = ids[missing:]
            if len(self._carry) < self._length:
                return
            self._write(self._carry)
            self._carry = self._carry[:0]
        whole = len(ids) // self._length * self._length
        self._write(ids[:whole])
        self._carry = ids[whole:].copy()

    def _write(self, ids: NDArray[np.unsignedinteger]) -> None:
        if len(ids):
            self._max_seen = max(self._max_seen, int(ids.max()))  # of what is stored: the tail is not
            view = np.ascontiguousarray(ids).view(np.uint8).data
            self._digest.update(view)
            written = 0
            try:
                while written < len(view):
                    written += self._file.write(view[written:])
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise DiskFullError(describe_full_disk(self.path, len(view) - written)) from None
            self._num_sequences += len(ids) // self._length

    def seal(self) -> tuple[ShardHeader | None, NDArray[np.unsignedinteger]]:
        """Write the header; ``commit`` then makes the file durable and gives it its name.

        Returns:
            The header (``None``, and no file, when there was not one whole sequence) and the tail ``[t]``,
            t < sequence_length.
        """
        if not self._num_sequences:
            self.discard()
            return None, self._carry
        header = ShardHeader(
            self._dtype,
            self._alignment,
            self._length,
            self._num_sequences,
            self._max_seen,
            self._digest.intdigest(),
        )
        self._file.seek(0)
        self._file.write(header.pack())
        return header, self._carry

    def commit(self) -> None:
        """fsync and rename; nothing to do for a writer that stored no sequence."""
        if self._file.closed:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)

    def close(self) -> tuple[ShardHeader | None, NDArray[np.unsignedinteger]]:
        """``seal`` and ``commit``."""
        sealed = self.seal()
        self.commit()
        return sealed

    def discard(self) -> None:
        """Drop the unfinished file."""
        self._file.close()
        self._part.unlink(missing_ok=True)
