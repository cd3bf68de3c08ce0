"""One segment: read → choose the split → encode → pack → write, then commit its record."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from calm_scale.config.files import naming
from data_prep.ahead import Ahead
from data_prep.documents import Bad, Texts
from data_prep.journal import Journal
from data_prep.manifest import ShardEntry
from data_prep.packing import build_packer
from data_prep.plan import Plan, Split
from data_prep.record import SegmentRecord, SplitOutput
from data_prep.shards import SUFFIX, ShardWriter
from data_prep.sources import Reader
from data_prep.tokenizer import Tokenizer

_KEPT_BYTES = 1 << 20
_HASH_RANGE = float(1 << 64)


def document_share(text: str) -> float:
    """Where a document's content puts it in [0, 1): the same text is always in the same split."""
    return xxhash.xxh3_64_intdigest(text.encode()) / _HASH_RANGE


class SplitSink:
    """One split of one segment: documents in, a shard and a tail out."""

    def __init__(self, plan: Plan, split: Split, journal: Journal, item: int, segment: int) -> None:
        prep = plan.prep
        self._tokenizer_policy = (plan.tokenizer["add_bos"], plan.tokenizer["add_eos"])
        self.split, self._source = split, plan.inputs[item].source
        self._origin = f"{Path(plan.inputs[item].name).name}#{segment}"
        self._packer = build_packer(prep.packing, prep.sequence_length, prep.alignment, plan.pad_id)
        self._dtype = np.dtype(plan.dtype).newbyteorder("<")
        self._writer = ShardWriter(
            journal.data_dir / split.name / f"{item:06d}-{segment:06d}{SUFFIX}",
            self._dtype,
            alignment=prep.alignment,
            sequence_length=prep.sequence_length,
            max_id=plan.vocab_size - 1,
            tag=f".{journal.attempt}",
        )
        self._tail = journal.record_path(item, segment).with_suffix(f".{split.name}.tail")
        self._out = SplitOutput()
        self._histogram = np.zeros(64, np.int64)

    def add(self, ids: NDArray[np.uint32], offsets: NDArray[np.int64]) -> None:
        """Store framed documents."""
        count = len(offsets) - 1
        framing = (self._tokenizer_policy[0] + self._tokenizer_policy[1]) * count
        self._out.documents += count
        self._out.bos += self._tokenizer_policy[0] * count
        self._out.eos += self._tokenizer_policy[1] * count
        self._out.text_tokens += len(ids) - framing
        lengths = np.maximum(np.diff(offsets), 1)
        self._histogram += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        self._writer.append(self._packer.add(ids, offsets))

    def seal(self) -> SplitOutput:
        """Finish the shard's contents; ``commit`` makes it and the tail durable."""
        self._writer.append(self._packer.finish())
        header, self._left = self._writer.seal()
        if header is not None:
            self._out.shards.append(
                ShardEntry(
                    name=self._writer.path.name,
                    num_sequences=header.num_sequences,
                    checksum=f"{header.checksum:016x}",
                    max_id=header.max_id,
                    source=self._source,
                    origin=self._origin,
                )
            )
        self._out.tail_tokens = len(self._left)
        self._out.padding = self._packer.padding
        self._out.length_histogram = np.trim_zeros(self._histogram, "b").tolist()
        return self._out

    def commit(self) -> None:
        """Give the shard its name and write the tail."""
        self._writer.commit()
        write_synced(self._tail, self._left.astype(self._dtype).tobytes())

    def discard(self) -> None:
        """Leave nothing behind."""
        self._writer.discard()


@dataclass(frozen=True)
class Segment:
    """A segment whose shards are written but not yet durable."""

    record: SegmentRecord
    commit: Callable[[], None]
    discard: Callable[[], None]


def run_segment(
    plan: Plan,
    journal: Journal,
    tokenizer: Tokenizer,
    reader: Reader,
    item: int,
    segment: int,
    *,
    duplicates: Collection[int] = (),
    on_block: Callable[[Texts, int], None] = lambda texts, tokens: None,
) -> Segment | None:
    """Carry out one segment, up to its commit; ``None`` when the input ended before it.

    ``duplicates`` are the ordinals of this segment's good documents to leave out. ``on_block`` is told of each
    block and its number of tokens, and may raise to stop. The next block is read while one is encoded.
    """
    sinks = [SplitSink(plan, split, journal, item, segment) for split in plan.splits]
    record = SegmentRecord(item=item, segment=segment, last=False)
    rejected: list[Bad] = []
    quarantined: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    ordinal = 0
    try:
        with Ahead(reader.texts(segment)) as blocks:
            for block in blocks:
                texts = block.texts
                if duplicates:
                    texts = [t for i, t in enumerate(texts, ordinal) if i not in duplicates]
                    record.duplicates += len(block.texts) - len(texts)
                ordinal += len(block.texts)
                tokens = _store(texts, sinks, tokenizer)
                record.read += block.read
                record.filtered += block.filtered
                record.text_bytes += block.num_bytes
                quarantined.update(bad.kind for bad in block.bad)
                notes.update(block.notes)
                rejected += [Bad(b.line, b.kind, b.raw[:_KEPT_BYTES]) for b in block.bad]
                on_block(block, tokens)
        if segment and not record.read and reader.ended:
            _discard(sinks)
            return None
        record.splits = {sink.split.name: sink.seal() for sink in sinks}
    except BaseException:
        _discard(sinks)
        raise
    record.last, record.content = reader.ended, reader.content
    if record.last:
        notes.update(reader.notes)
    record.quarantined, record.notes = dict(quarantined), dict(notes)

    def commit() -> None:
        try:
            for sink in sinks:
                sink.commit()
            _write_rejected(journal.record_path(item, segment), plan.inputs[item].name, rejected)
            journal.write_record(record)
        except BaseException:
            _discard(sinks)
            raise

    return Segment(record, commit, lambda: _discard(sinks))


def _store(texts: list[str], sinks: list[SplitSink], tokenizer: Tokenizer) -> int:
    """Encode each split's documents and store them; the number of ids."""
    tokens = 0
    for sink, chosen in zip(sinks, _divide(texts, [sink.split for sink in sinks]), strict=True):
        if chosen:
            ids, offsets = tokenizer.encode_documents(chosen)
            sink.add(ids, offsets)
            tokens += len(ids)
    return tokens


def _divide(texts: list[str], splits: list[Split]) -> list[list[str]]:
    """The documents of each split, in order."""
    if len(splits) == 1:
        return [texts]
    shares = [document_share(text) for text in texts]
    return [
        [text for text, share in zip(texts, shares, strict=True) if split.low <= share < split.high]
        for split in splits
    ]


def _discard(sinks: list[SplitSink]) -> None:
    for sink in sinks:
        sink.discard()


def _write_rejected(record: Path, name: str, rejected: list[Bad]) -> None:
    """Rejected records as JSON lines: file, true line, kind, and the raw bytes (surrogate-escaped)."""
    lines = [
        json.dumps(
            {"file": name, "line": b.line, "kind": b.kind, "raw": b.raw.decode("utf-8", "surrogateescape")}
        )
        for b in rejected
    ]
    if lines:
        write_synced(record.with_suffix(".rejected"), ("\n".join(lines) + "\n").encode())


def write_synced(path: Path, data: bytes) -> None:
    """Write and fsync; the record that names this file is committed afterwards."""
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
