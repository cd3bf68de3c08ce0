"""What is done with one segment of an input: encoded (read → choose the split → encode → pack → write, then commit its
record), or hashed, which finds the documents that repeat an earlier one.

Exact deduplication keeps the first of documents with the same content in corpus order. Pass one writes a 128-bit hash
per document. One process then finds the repeats, a range of hash values at a time, and writes for each segment the
ordinals to leave out. Pass two encodes the rest.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from calm_scale.config.files import naming, write_atomically
from data_prep.errors import CorruptSourceError
from data_prep.inputs.records import Bad, Reader, Texts
from data_prep.prefetch import read_ahead
from data_prep.prep.journal import DropList, HashFile, Journal, SegmentRecord, SplitOutput
from data_prep.prep.packing import build_packer
from data_prep.prep.prep_plan import Plan, Split
from data_prep.shards import SUFFIX, ShardWriter
from data_prep.shards.manifest import describe_shard
from data_prep.tokenizer import Tokenizer

_KEPT_BYTES = 1 << 20
_HASH_RANGE = float(1 << 64)
_SAMPLE_CHARACTERS = 4096
_ROWS_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class Outcome:
    """A finished segment: whether nothing of the input follows it."""

    last: bool


class Task(Protocol):
    """What is done with each segment. ``name`` keeps the claims of several tasks apart."""

    name: str

    def finished(self, item: int, segment: int) -> Outcome | None:
        """The outcome of a segment that an earlier attempt (or another worker) committed."""
        ...

    def carry_out(
        self, reader: Reader, item: int, segment: int, on_block: Callable[[Texts, int], None]
    ) -> Outcome | None:
        """Do the segment; ``None`` when the input ended before it. It is committed by the next ``settle``."""
        ...

    def settle(self) -> None:
        """Wait until everything carried out is durable; raise what went wrong with it."""
        ...


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
                describe_shard(self._writer.path, header, source=self._source, origin=self._origin)
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
        with closing(read_ahead(reader.texts(segment))) as blocks:
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


TaskName = Literal["encode", "hash"]


class EncodeTask:
    """Text → shards. A finished segment is made durable in a thread while the next one is encoded."""

    name = "encode"

    def __init__(self, plan: Plan, journal: Journal, tokenizer: Tokenizer) -> None:
        self._plan, self._journal, self._tokenizer = plan, journal, tokenizer
        tokenizer.check(["get ready"])  # loads the reference now, not in the middle of the work
        self._committer = ThreadPoolExecutor(1)
        self._committing: Future[None] | None = None

    def finished(self, item: int, segment: int) -> Outcome | None:
        """See ``Task``."""
        record = self._journal.read_record(item, segment)
        return None if record is None else Outcome(record.last)

    def carry_out(
        self, reader: Reader, item: int, segment: int, on_block: Callable[[Texts, int], None]
    ) -> Outcome | None:
        """See ``Task``. A corrupt input is recorded as such where the config allows it."""

        def checked(texts: Texts, tokens: int) -> None:
            self._check_sample(texts)
            on_block(texts, tokens)

        drop = DropList(self._journal, item, segment).read() if self._plan.prep.deduplicate else ()
        try:
            done = run_segment(
                self._plan,
                self._journal,
                self._tokenizer,
                reader,
                item,
                segment,
                duplicates=drop,
                on_block=checked,
            )
        except CorruptSourceError as error:
            if self._plan.prep.on_corrupt_file != "quarantine":
                raise
            self._journal.write_record(
                SegmentRecord(item=item, segment=segment, last=True, corrupt=str(error))
            )
            return Outcome(last=True)
        try:
            self.settle()
        except BaseException:
            if done is not None:
                done.discard()
            raise
        if done is None:
            return None
        self._committing = self._committer.submit(done.commit)
        return Outcome(done.record.last)

    def settle(self) -> None:
        """See ``Task``."""
        if self._committing is not None:
            committing, self._committing = self._committing, None
            committing.result()

    def _check_sample(self, texts: Texts) -> None:
        """One short document of each block is encoded by the reference too."""
        sample = texts.texts[len(texts.texts) // 2] if texts.texts else ""
        if sample and len(sample) <= _SAMPLE_CHARACTERS:
            self._tokenizer.check([sample])


class HashTask:
    """Documents → 128-bit hashes of their content."""

    def settle(self) -> None:
        """Nothing is under way: ``carry_out`` commits."""

    name = "hash"

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal

    def finished(self, item: int, segment: int) -> Outcome | None:
        """See ``Task``."""
        last = HashFile(self._journal, item, segment).last()
        return None if last is None else Outcome(last)

    def carry_out(
        self, reader: Reader, item: int, segment: int, on_block: Callable[[Texts, int], None]
    ) -> Outcome | None:
        """See ``Task``. A corrupt input ends here; the encoding pass reports it."""
        digests: list[bytes] = []
        read = 0
        last, corrupt = True, False
        try:
            for block in reader.texts(segment):
                digests += [xxhash.xxh3_128_digest(text.encode()) for text in block.texts]
                read += block.read
                on_block(block, 0)
            last = reader.ended
        except CorruptSourceError:
            if self._plan.prep.on_corrupt_file != "quarantine":
                raise
            digests, corrupt = [], True
        if segment and not read and last and not corrupt:
            return None
        hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
        HashFile(self._journal, item, segment).write(hashes, last=last, corrupt=corrupt)
        return Outcome(last)


def build_task(name: TaskName, plan: Plan, journal: Journal, tokenizer: Tokenizer | None) -> Task:
    """The task of that name; only encoding needs a tokenizer."""
    if name == "hash" or tokenizer is None:
        return HashTask(plan, journal)
    return EncodeTask(plan, journal, tokenizer)


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
