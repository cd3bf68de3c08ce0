"""A worker: takes segments that nobody has, until there are none. Any number of workers, one result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.documents import HARMLESS, Texts
from data_prep.errors import PrepError, SourceError
from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.record import SegmentRecord
from data_prep.segment import run_segment
from data_prep.sources import Reader
from data_prep.tokenizer import Tokenizer

_PROGRESS_SECONDS = 0.5
_SAMPLE_CHARACTERS = 4096


class StoppedError(PrepError):
    """Another process of this attempt failed; its error is the one to show."""


@dataclass
class Progress:
    """What one worker has done so far in this attempt."""

    documents: int = 0
    quarantined: int = 0
    harmless: int = 0
    text_bytes: int = 0
    tokens: int = 0


class Worker:
    """Carries out segments of ``plan``. ``number`` distinguishes the workers of an attempt."""

    def __init__(
        self, plan: Plan, journal: Journal, tokenizer: Tokenizer, number: int, parent: int | None = None
    ) -> None:
        self._parent = parent
        self._plan, self._journal, self._tokenizer, self._number = plan, journal, tokenizer, number
        self.progress = Progress()
        self._told = 0.0
        self._progress_file = journal.attempt_dir / "progress" / f"{number:05d}.json"

    def run(self) -> None:
        """Work until no segment is left.

        Raises:
            PrepError, SourceError, ShardError: what stopped it; every other worker is told to stop.
        """
        for item in self._files_to_start():
            self._read_from(item, first=True)
        for item in range(len(self._plan.inputs)):
            self._read_from(item, first=False)
        self._tell(force=True)

    def _files_to_start(self) -> Iterator[int]:
        """Inputs nobody has begun, largest first, so that the long ones do not come last."""
        sizes = [-item.text_bytes for item in self._plan.inputs]
        for item in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
            if self._journal.claim(f"owner-{item:06d}"):
                yield item

    def _read_from(self, item: int, *, first: bool) -> None:
        """Carry out unclaimed segments of one input. Its owner goes on to the end; a helper only takes segments
        that the input's size leads one to expect."""
        expected = self._plan.expected_segments(self._plan.inputs[item])
        reader: Reader | None = None
        segment = 0
        while first or segment < expected:
            record = self._journal.read_record(item, segment)
            if record is None and self._journal.claim(f"{item:06d}-{segment:06d}"):
                if reader is None:
                    source = self._plan.prep.sources[self._plan.inputs[item].source]
                    reader = Reader(self._plan.inputs[item], source, self._plan.segment_bytes, segment)
                record = self._carry_out(reader, item, segment)
                if record is None or record.corrupt or reader.ended:
                    return
            if record is not None and record.last:
                return
            segment += 1

    def _carry_out(self, reader: Reader, item: int, segment: int) -> SegmentRecord | None:
        try:
            return run_segment(
                self._plan,
                self._journal,
                self._tokenizer,
                reader.texts(segment),
                reader,
                item,
                segment,
                on_block=self._on_block,
            )
        except SourceError as error:
            if self._plan.prep.on_corrupt_file != "quarantine":
                raise
            record = SegmentRecord(item=item, segment=segment, last=True, corrupt=str(error))
            self._journal.write_record(record)
            return record

    def _on_block(self, texts: Texts, tokens: int) -> None:
        harmless = sum(bad.kind in HARMLESS for bad in texts.bad)
        self.progress.documents += len(texts.texts)
        self.progress.quarantined += len(texts.bad) - harmless
        self.progress.harmless += harmless
        self.progress.text_bytes += texts.num_bytes
        self.progress.tokens += tokens
        self._check_sample(texts)
        self._tell()

    def _check_sample(self, texts: Texts) -> None:
        """One short document of each block is encoded by the reference too."""
        sample = texts.texts[len(texts.texts) // 2] if texts.texts else ""
        if sample and len(sample) <= _SAMPLE_CHARACTERS:
            self._tokenizer.check(sample)

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < _PROGRESS_SECONDS:
            return
        self._told = now
        part = self._progress_file.with_suffix(".part")
        with suppress(OSError):  # progress is for the eye; the records are the truth
            part.write_text(json.dumps(asdict(self.progress)), encoding="utf-8")
            part.replace(self._progress_file)
        if self._parent is not None and os.getppid() != self._parent:
            raise StoppedError("stopped because the process that started this worker is gone")
        if self._journal.failed():
            raise StoppedError("stopped because another process of this prep failed")


def total_progress(folder: Path) -> Progress:
    """The sum over the workers of an attempt."""
    total = Progress()
    for path in folder.glob("*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for name, value in values.items():
            setattr(total, name, getattr(total, name) + value)
    return total
