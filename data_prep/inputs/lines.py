"""Whole lines of a text stream in numbered segments.

Segment k of a file is the lines that *start* in [k · S, (k + 1) · S) bytes of its text. That depends on the file
and S alone, so any worker finds the same lines in the same segment, whatever it read before. The stream below them
decompresses and verifies: a file counts as read when its last frame has ended, checksum included.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from data_prep.errors import CorruptSourceError, SourceError

BLOCK_BYTES = 4 << 20
LINE_LIMIT = 256 << 20
_LINE_FEED = 10
BOM = b"\xef\xbb\xbf"
READ_BYTES = 1 << 18
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_HAS_CHECKSUM = 0x04


@dataclass(frozen=True)
class LineBlock:
    """Whole lines; ``first_line`` is the number of the first,
    counted from 1 at the point where reading began. ``overlong``: the start of one line that
    is longer than the limit (the rest of it was dropped)."""

    data: bytes
    first_line: int
    overlong: bool = False

    @cached_property
    def _newlines(self) -> NDArray[np.int64]:
        """Positions of the line feeds."""
        return np.flatnonzero(np.frombuffer(self.data, np.uint8) == _LINE_FEED)

    @property
    def num_line_ends(self) -> int:
        """Line feeds in the block."""
        return len(self._newlines)

    @property
    def num_lines(self) -> int:
        """Lines in the block; the last one of a file may lack its line feed."""
        return len(self._newlines) + (not self.data.endswith(b"\n"))

    def every_line_starts_with(self, letter: bytes) -> bool:
        """Whether the first byte of each line is ``letter``."""
        starts = self._newlines + 1
        if len(starts) and starts[-1] == len(self.data):
            starts = starts[:-1]
        first = np.frombuffer(self.data, np.uint8)
        return self.data.startswith(letter) and bool((first[starts] == letter[0]).all())


class LineStream:
    """Reads segments of one file in increasing order.

    Attributes:
        ended: the stream was read to its verified end: no line starts after what was yielded.
    """

    def __init__(self, path: Path, kind: str, segment_bytes: int, first_segment: int = 0) -> None:
        self._path, self._segment_bytes = path, segment_bytes
        # A plain file can be entered anywhere; a compressed one is decompressed from its start.
        self._start = max(0, first_segment * segment_bytes - 1) if kind == "plain" else 0
        self.stream = ByteStream(path, kind, self._start)
        self._chunks = self.stream.chunks()
        self._waiting = b""
        self._position = self._start  # of the first byte of _waiting
        self._line = 1
        self.ended = False

    @cached_property
    def lines_skipped(self) -> int:
        """Lines before the point where reading began: add it to a block's line number for the true one."""
        return _newlines_before(self._path, self._start)

    def blocks(self, segment: int) -> Iterator[LineBlock]:
        """The lines of ``segment``, in blocks of about 4 MiB."""
        if not self._position:
            self._drop_byte_order_mark()
        self._skip_to(segment * self._segment_bytes)
        end = (segment + 1) * self._segment_bytes
        while self._position < end and (self._waiting or self._more()):
            pieces: list[bytes] = []
            size = 0
            while size < BLOCK_BYTES and self._position < end and (self._waiting or self._more()):
                pieces.append(self._advance(min(len(self._waiting), end - self._position)))
                size += len(pieces[-1])
            yield from self._whole_lines(pieces, end)
        self.ended = not self._waiting and not self._more()

    def _drop_byte_order_mark(self) -> None:
        if self._more() and self._waiting.startswith(BOM):
            self.stream.notes["byte_order_marks"] += 1
            self._advance(len(BOM))

    def _whole_lines(self, pieces: list[bytes], end: int) -> Iterator[LineBlock]:
        """Yield whole lines; the line that is cut goes back, or is read to its end when it crosses ``end`` or
        fills the block."""
        cut = pieces[-1].rfind(b"\n") + 1
        if cut == len(pieces[-1]):
            yield self._block(b"".join(pieces))
            return
        if cut and self._position < end:
            rest = pieces[-1][cut:]
            pieces[-1] = pieces[-1][:cut]
            self._waiting = rest + self._waiting
            self._position -= len(rest)
            yield self._block(b"".join(pieces))
            return
        overlong = self._finish_line(pieces)
        data = b"".join(pieces)
        if not overlong:
            yield self._block(data)
            return
        cut = data.rfind(b"\n", 0, len(data) - 1) + 1
        if cut:
            yield self._block(data[:cut])
        yield self._block(data[cut:], overlong=True)

    def _finish_line(self, pieces: list[bytes]) -> bool:
        """Append the rest of the line; True when it is over the limit (what exceeds it is dropped)."""
        size = sum(map(len, pieces))
        while self._waiting or self._more():
            at = self._waiting.find(b"\n")
            piece = self._advance(at + 1 if at >= 0 else len(self._waiting))
            size += len(piece)
            if size <= LINE_LIMIT:
                pieces.append(piece)
            if at >= 0:
                break
        return size > LINE_LIMIT

    def _block(self, data: bytes, overlong: bool = False) -> LineBlock:
        block = LineBlock(data[:4096] if overlong else data, self._line, overlong)
        self._line += 1 if overlong else block.num_line_ends
        return block

    def _advance(self, size: int) -> bytes:
        piece, self._waiting = self._waiting[:size], self._waiting[size:]
        self._position += size
        return piece

    def _more(self) -> bool:
        while not self._waiting:
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._waiting = chunk
        return True

    def _skip_to(self, start: int) -> None:
        """Move to the first line that starts at or after ``start``, through any number of chunks."""
        if self._position >= start:
            return
        while self._waiting or self._more():
            before_last = start - 1 - self._position  # a line ending at start - 1 makes one start at start
            at = self._waiting.find(b"\n", max(0, before_last))
            passed = self._advance(at + 1 if at >= 0 else len(self._waiting))
            self._line += passed.count(b"\n")
            if at >= 0:
                return


def _newlines_before(path: Path, end: int) -> int:
    count = 0
    with path.open("rb") as file:
        while end > 0 and (piece := file.read(min(end, 1 << 22))):
            count += piece.count(b"\n")
            end -= len(piece)
    return count


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
