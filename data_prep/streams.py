"""Bytes of a plain, gzip or zstd file in order, with every way of ending early found out.

Python's zstd stream readers accept a truncated frame in silence; here a file counts as read only when its last
frame (zstd) or member (gzip) has ended, checksum included.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from data_prep.errors import CorruptSourceError, SourceError

READ_BYTES = 1 << 18
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_HAS_CHECKSUM = 0x04


class ByteStream:
    """Decompressed bytes of one file.

    Attributes:
        notes: after the end, facts to report: ``zstd_frames``, ``zstd_frames_without_checksum``,
            ``gzip_members``.
        consumed: compressed bytes read so far.
    """

    def __init__(self, path: Path, kind: str, start: int = 0) -> None:
        self.path, self.kind = path, kind
        self.notes: Counter[str] = Counter()
        self.consumed = start
        self._start = start

    def chunks(self) -> Iterator[bytes]:
        """Pieces of the text, in order.

        Raises:
            SourceError: the file is missing, truncated or corrupt; names the byte where it broke.
        """
        try:
            with self.path.open("rb") as file:
                if self.kind == "zst":
                    yield from self._zstd(file)
                elif self.kind == "gz":
                    yield from self._gzip(file)
                else:
                    yield from self._plain(file)
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _read(self, file: BinaryIO, size: int = READ_BYTES) -> bytes:
        piece = file.read(size)
        self.consumed += len(piece)
        return piece

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self._start)
        while piece := self._read(file, 4 * READ_BYTES):
            yield piece

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        waiting = self._read(file)
        if not waiting:
            raise self._broken("is empty: not even one gzip member")
        while True:
            waiting = waiting or self._read(file)
            if self.notes["gzip_members"]:
                waiting = waiting.lstrip(b"\0")  # zero padding may follow a member
            if not waiting:
                if not self._read_more(file):
                    return
                continue
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                data = waiting or self._read(file)
                if not data:
                    raise self._broken("is truncated: its last gzip member does not end")
                try:
                    text = member.decompress(data, 8 * READ_BYTES)
                except zlib.error as error:
                    raise self._broken(f"is corrupt ({error})") from None
                waiting = member.unconsumed_tail
                if text:
                    yield text
            waiting = member.unused_data
            self.notes["gzip_members"] += 1

    def _read_more(self, file: BinaryIO) -> bool:
        """Whether bytes remain after a run of padding (looks one byte ahead)."""
        at = file.tell()
        more = bool(file.read(1))
        file.seek(at)
        return more

    def _zstd(self, file: BinaryIO) -> Iterator[bytes]:
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        waiting = self._read(file)
        if not waiting:
            raise self._broken("is empty: not even one zstd frame")
        while True:
            while len(waiting) < 18 and (more := self._read(file)):
                waiting += more
            if not waiting:
                return
            magic = int.from_bytes(waiting[:4], "little")
            if magic in _SKIPPABLE_MAGIC and len(waiting) >= 8:
                waiting = self._skip(file, waiting[8:], struct.unpack_from("<I", waiting, 4)[0])
                continue
            if magic != _ZSTD_MAGIC:
                truncated = len(waiting) < 4
                raise self._broken("is truncated" if truncated else "is corrupt: no zstd frame begins there")
            self.notes["zstd_frames"] += 1
            if len(waiting) > 4 and not waiting[4] & _HAS_CHECKSUM:
                self.notes["zstd_frames_without_checksum"] += 1
            frame = decompressor.decompressobj()
            while not frame.eof:
                data = waiting or self._read(file)
                waiting = b""
                if not data:
                    raise self._broken("is truncated: its last zstd frame does not end")
                try:
                    text = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise self._broken(f"is corrupt ({error})") from None
                if text:
                    yield text
            waiting = frame.unused_data

    def _skip(self, file: BinaryIO, waiting: bytes, size: int) -> bytes:
        while size > len(waiting):
            size -= len(waiting)
            waiting = self._read(file)
            if not waiting:
                raise self._broken("is truncated inside a skippable zstd frame")
        return waiting[size:] or self._read(file)

    def _broken(self, what: str) -> CorruptSourceError:
        return CorruptSourceError(f"{self.path} {what} (after {self.consumed} bytes of the file)")
