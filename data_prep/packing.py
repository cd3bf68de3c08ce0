"""Framed documents → the stream of ids that is cut into sequences.

``concat``: one after the other, as the paper does. ``aligned``: each document padded to a multiple of K.
``best-fit``: whole documents (K-aligned) placed where they fit best, so that no document is cut unless it is
longer than a sequence; every sequence is padded to its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import PrepMistakeError

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]

WINDOW_TOKENS = 4 << 20
MOST_IDS = 1 << 29
"""Held in memory at once: more than the longest line that is read and a window of documents ever need together."""


class Packer(Protocol):
    """Takes documents in order, gives ids in order. ``padding`` counts pad ids emitted so far."""

    padding: int

    def add(self, ids: Ids, offsets: Offsets) -> Ids:
        """Documents ids[offsets[i]:offsets[i+1]] → ids ready to be stored."""
        ...

    def finish(self) -> Ids:
        """What was held back."""
        ...


class ConcatPacker:
    """No padding: the flat ids are the stream."""

    padding = 0

    def add(self, ids: Ids, offsets: Offsets) -> Ids:
        """See ``Packer``."""
        return ids

    def finish(self) -> Ids:
        """Nothing is held back."""
        return np.empty(0, np.uint32)


class AlignedPacker:
    """Each document starts at a multiple of ``alignment``; ``PrepMistakeError`` where the padding would fill the
    memory."""

    def __init__(self, alignment: int, pad_id: int) -> None:
        self._alignment, self._pad = alignment, pad_id
        self.padding = 0

    def add(self, ids: Ids, offsets: Offsets) -> Ids:
        """See ``Packer``."""
        lengths = np.diff(offsets)
        padded = -(-lengths // self._alignment) * self._alignment
        gaps = padded - lengths
        out = _padding(int(padded.sum()), self._pad, len(ids))
        shift = np.repeat(np.cumsum(gaps) - gaps, lengths)
        out[np.arange(len(ids)) + shift] = ids
        self.padding += int(gaps.sum())
        return out

    def finish(self) -> Ids:
        """Nothing is held back."""
        return np.empty(0, np.uint32)


class BestFitPacker:
    """Best-fit decreasing over windows of ``WINDOW_TOKENS`` ids, cut at documents: bounded memory, and the same
    windows however the documents arrive. The later pieces of a document longer than a sequence each stand first
    in a sequence of their own, so that none follows the end of another document."""

    def __init__(self, sequence_length: int, alignment: int, pad_id: int) -> None:
        self._length, self._alignment, self._pad = sequence_length, alignment, pad_id
        self._starts: list[Ids] = []  # documents, or their first sequence_length ids
        self._rests: list[Ids] = []
        self._size = 0
        self.padding = 0

    def add(self, ids: Ids, offsets: Offsets) -> Ids:
        """See ``Packer``."""
        out: list[Ids] = []
        for i in range(len(offsets) - 1):
            document = ids[offsets[i] : offsets[i + 1]]
            self._starts.append(document[: self._length])
            rest = range(self._length, len(document), self._length)
            self._rests += [document[start : start + self._length] for start in rest]
            self._size += len(document)
            if self._size >= WINDOW_TOKENS:
                out.append(self.finish())
        return np.concatenate(out) if out else np.empty(0, np.uint32)

    def finish(self) -> Ids:
        """Pack the window: whole sequences [n · sequence_length].

        Raises:
            PrepMistakeError: they do not fit into memory.
        """
        bins = [[piece] for piece in self._rests]
        room = sorted((self._length - self._padded(piece), i) for i, piece in enumerate(self._rests))
        for piece in sorted(self._starts, key=len, reverse=True):
            need = self._padded(piece)
            at = bisect_left(room, (need, -1))
            if at == len(room):
                bins.append([piece])
                free, number = self._length, len(bins) - 1
            else:
                free, number = room.pop(at)
                bins[number].append(piece)
            insort(room, (free - need, number))
        out = _padding(len(bins) * self._length, self._pad, self._size)
        for number, members in enumerate(bins):
            at = number * self._length
            for piece in members:
                out[at : at + len(piece)] = piece
                at += self._padded(piece)
        self.padding += len(out) - self._size
        self._starts, self._rests, self._size = [], [], 0
        return out

    def _padded(self, piece: Ids) -> int:
        """Length rounded up to the alignment."""
        return -(-len(piece) // self._alignment) * self._alignment


def _padding(size: int, pad_id: int, tokens: int) -> Ids:
    """``size`` pad ids, into which documents of ``tokens`` ids are laid.

    Raises:
        PrepMistakeError: more than ``MOST_IDS``.
    """
    if size > MOST_IDS:
        raise PrepMistakeError(
            f"prep.packing would lay documents of {tokens:,} tokens into {size:,} ids, almost all of them padding: "
            "lower prep.sequence_length or prep.alignment, or set prep.packing to concat"
        )
    return np.full(size, pad_id, np.uint32)


def build_packer(packing: str, sequence_length: int, alignment: int, pad_id: int | None) -> Packer:
    """The packer of that name; ``pad_id`` is needed by all but ``concat``."""
    if packing == "concat" or pad_id is None:
        return ConcatPacker()
    if packing == "aligned":
        return AlignedPacker(alignment, pad_id)
    return BestFitPacker(sequence_length, alignment, pad_id)
