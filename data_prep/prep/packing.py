"""Framed documents → the stream of ids that is cut into sequences.

``concat``: one after the other, as the paper does. ``aligned``: each document padded to a multiple of K.
``best-fit``: whole documents (K-aligned) placed where they fit best, so that no document is cut unless it is
longer than a sequence; every sequence is padded to its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import PrepError, StarvedSplitError
from data_prep.prep.journal import Journal, SegmentRecord, SplitOutput
from data_prep.prep.prep_plan import MOST_IDS, Plan, Split
from data_prep.shards import SUFFIX, ShardWriter
from data_prep.shards.manifest import ShardEntry, TokenCounts, describe_shard
from data_prep.tokenizer import Tokenizer

WINDOW_TOKENS = 4 << 20


Ids = NDArray[np.uint32]


Offsets = NDArray[np.int64]


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
    """Each document starts at a multiple of ``alignment``; ``PrepError`` where the padding would fill the
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
            PrepError: they do not fit into memory.
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
        PrepError: more than ``MOST_IDS``.
    """
    if size > MOST_IDS:
        raise PrepError(
            f"prep.packing would lay documents of {tokens:,} tokens into {size:,} ids, almost all of them padding: "
            "lower prep.sequence_length or prep.alignment, or set prep.packing to concat",
            mistake=True,
        )
    return np.full(size, pad_id, np.uint32)


def build_packer(packing: str, sequence_length: int, alignment: int, pad_id: int | None) -> Packer:
    """The packer of that name; ``pad_id`` is needed by all but ``concat``."""
    if packing == "concat" or pad_id is None:
        return ConcatPacker()
    if packing == "aligned":
        return AlignedPacker(alignment, pad_id)
    return BestFitPacker(sequence_length, alignment, pad_id)


def filler_id(tokenizer: Tokenizer) -> int:
    """The id that fills up a last sequence: padding, or EOS, BOS, 0 for a tokenizer without. Readers count filler
    and never look for the id, so it need not be one that no text holds."""
    known = (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id)
    return next((number for number in known if number is not None), 0)


@dataclass(frozen=True)
class JoinedTail:
    """The ends of one source's segments, joined.

    Attributes:
        shard: ``None`` where there was not one sequence.
        left_out: ids after the last whole sequence.
        boundaries, padding: BOS ids and alignment that were put in where documents of two segments meet.
    """

    shard: ShardEntry | None
    left_out: int
    boundaries: int
    padding: int


def join_tails(
    plan: Plan,
    journal: Journal,
    split: Split,
    source: int,
    records: list[SegmentRecord],
    tokenizer: Tokenizer,
) -> JoinedTail:
    """What the segments of one source left over, one after the other, as one more shard.

    The last, incomplete sequence is filled up where ``prep.keep_tail`` names the split.

    Raises:
        StarvedSplitError: the last sequence would be ``MOST_IDS`` of filler and more.
    """
    prep = plan.prep
    dtype = np.dtype(plan.dtype).newbyteorder("<")
    paths = [journal.record_path(r.item, r.segment).with_suffix(f".{split.name}.tail") for r in records]
    boundary = _boundary(plan, tokenizer).astype(dtype)
    joins = _count_joins(paths, tokenizer, dtype) if len(boundary) else 0
    left_over = sum(r.splits[split.name].tail_tokens for r in records)
    missing = _filler(plan, split, left_over + joins * len(boundary))
    writer = ShardWriter(
        journal.data_dir / split.name / f"tail-{source:06d}{SUFFIX}",
        dtype,
        alignment=prep.alignment,
        sequence_length=prep.sequence_length,
        max_id=plan.vocab_size - 1,
    )
    follows = False
    for path in paths:
        ids = np.fromfile(path, dtype)
        if follows and len(boundary) and _continues(ids, tokenizer):
            writer.append(boundary)
        writer.append(ids)
        follows = follows or len(ids) > 0
    writer.append(np.full(missing, filler_id(tokenizer), dtype))
    header, left = writer.close()
    padding = joins * max(0, len(boundary) - 1)
    if header is None:
        return JoinedTail(None, len(left), joins, padding)
    entry = describe_shard(writer.path, header, source=source, origin="ends of all segments", filler=missing)
    return JoinedTail(entry, len(left), joins, padding)


def _boundary(plan: Plan, tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """What separates the rest of a document from the document of another segment before it: BOS, as a patch of its
    own where documents are aligned. Empty where EOS ends every document, or where nothing separates documents."""
    if not tokenizer.add_bos or tokenizer.add_eos or tokenizer.bos_id is None:
        return np.empty(0, np.uint32)
    aligned = plan.prep.packing == "aligned" and plan.pad_id is not None
    pads = [plan.pad_id] * (plan.prep.alignment - 1) if aligned else []
    return np.array([tokenizer.bos_id, *pads], np.uint32)


def _count_joins(paths: list[Path], tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger]) -> int:
    """Ends of segments that begin inside a document and follow the end of another segment."""
    firsts = [first for path in paths if len(first := np.fromfile(path, dtype, count=1))]
    return sum(_continues(first, tokenizer) for first in firsts[1:])


def _continues(ids: NDArray[np.unsignedinteger], tokenizer: Tokenizer) -> bool:
    """Whether the end of a segment begins inside a document."""
    return len(ids) > 0 and ids[0] != tokenizer.bos_id


def _filler(plan: Plan, split: Split, left_over: int) -> int:
    """Ids that fill up the last sequence of a split that keeps it."""
    length = plan.prep.sequence_length
    missing = -left_over % length if split.name in plan.prep.keep_tail else 0
    if missing > MOST_IDS:
        raise StarvedSplitError(
            f"the last sequence of the split {split.name!r} has {left_over % length:,} tokens of {length:,}, and "
            "prep.keep_tail would fill it up: lower prep.sequence_length, or take the split out of prep.keep_tail"
        )
    return missing


def refuse_starved(
    plan: Plan, split: Split, tokens: TokenCounts, shards: list[ShardEntry], records: list[SegmentRecord]
) -> None:
    """Refuse a split without one whole sequence: training could not read it.

    A held-out text that has the corpus to itself may be shorter when its tail is stored: it is scored as it is.

    Raises:
        StarvedSplitError: names the split, and a share that is enough or that the corpus has too few documents.
    """
    length = plan.prep.sequence_length
    got = tokens.text + tokens.bos + tokens.eos
    whole = sum(s.num_sequences for s in shards) - sum(s.filler > 0 for s in shards)
    if whole or (shards and len(plan.splits) == 1 and split.name == "heldout"):
        return
    outputs = [output for record in records for output in record.splits.values()]
    everything = sum(o.text_tokens + o.bos + o.eos + o.padding for o in outputs)
    name, given = split.name, split.high - split.low
    if everything < length or len(plan.splits) == 1:
        raise StarvedSplitError(
            f"the split {name!r} got {got} of {everything} tokens, less than one sequence of {length}: "
            "add text or lower prep.sequence_length"
        )
    share = _sufficient_share(outputs, everything, length)
    others = [s for s in plan.splits if s.name != name]
    for_others = sum(share if "train" in (name, s.name) else s.high - s.low for s in others)
    if given < share <= 1 - for_others:
        asked = (
            "the shares of the other splits leave too little"
            if name == "train"
            else f"prep.splits.{name} = {given:g} is too little"
        )
        raise StarvedSplitError(
            f"{asked}: the split {name!r} gets {got} tokens, less than one sequence of {length}. The smallest share "
            f"that works with this corpus is about {share:.2g}"
        )
    documents = sum(o.documents for o in outputs)
    raise StarvedSplitError(
        f"the split {name!r} got {got} of {everything} tokens, less than one sequence of {length}, and another share "
        f"would not help: the corpus has too few documents ({documents}), and each goes to one split as a whole. Add "
        "documents, lower prep.sequence_length, or set the shares in prep.splits to 0 and prepare the held-out text "
        "as a run of its own"
    )


def _sufficient_share(outputs: list[SplitOutput], tokens: int, length: int) -> float:
    """The share of the documents that holds ``length`` tokens with a margin of two standard deviations; above 1
    where the corpus has too few documents for that.

    Documents are drawn one by one, so the tokens of a share s vary by sqrt(s · Σ length²).
    """
    squares = sum(n * 2.0 ** (2 * i + 1) for o in outputs for i, n in enumerate(o.length_histogram))
    root = (sqrt(4 * squares) + sqrt(4 * squares + 4 * tokens * length)) / (2 * tokens)
    return ceil(100 * root**2) / 100 if root**2 > 0.01 else root**2
