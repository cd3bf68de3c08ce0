"""The two passes over the corpus: encoding it, and (for exact deduplication) hashing its documents first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
import xxhash

from data_prep.dedup import DropList, HashFile
from data_prep.documents import Texts
from data_prep.errors import CorruptSourceError
from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.record import SegmentRecord
from data_prep.segment import run_segment
from data_prep.sources import Reader
from data_prep.tokenizer import Tokenizer
from data_prep.worker import Outcome, Task

TaskName = Literal["encode", "hash"]
_SAMPLE_CHARACTERS = 4096


class EncodeTask:
    """Text → shards. A finished segment is made durable in a thread while the next one is encoded."""

    name = "encode"

    def __init__(self, plan: Plan, journal: Journal, tokenizer: Tokenizer) -> None:
        self._plan, self._journal, self._tokenizer = plan, journal, tokenizer
        tokenizer.get_ready()
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
            self._tokenizer.check(sample)


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
