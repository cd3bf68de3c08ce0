"""A worker: takes segments that nobody has, until there are none. Any number of workers, one result."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from data_prep.documents import HARMLESS, Texts
from data_prep.errors import PrepError
from data_prep.inputs import Input
from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.sources import Reader
from data_prep.usable import describe_records

_PROGRESS_SECONDS = 0.5
_CERTAIN = 1.5


class StoppedError(PrepError):
    """Another process of this attempt failed; its error is the one to show."""

    may_pass = True


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


@dataclass
class Progress:
    """What one worker has done so far in this attempt."""

    documents: int = 0
    quarantined: int = 0
    harmless: int = 0
    text_bytes: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0


class Worker:
    """Carries out ``task`` on segments of ``plan``. ``number`` distinguishes the workers of an attempt;
    ``parent`` is the process id whose end ends this worker."""

    def __init__(
        self, plan: Plan, journal: Journal, task: Task, number: int, parent: int | None = None
    ) -> None:
        self._plan, self._journal, self._task = plan, journal, task
        self._number, self._parent = number, parent
        self.progress = Progress()
        self._told = 0.0
        self._cpu_before = time.process_time()
        self._progress_file = journal.attempt_dir / "progress" / f"{task.name}-{number:05d}.json"

    def run(self) -> None:
        """Work until no segment is left.

        Raises:
            CalmScaleError: what stopped it.
        """
        try:
            for item in self._files_to_start():
                self._read_from(item, owner=True)
            num_inputs = len(self._plan.inputs)
            for i in range(num_inputs):
                self._read_from((i + self._number) % num_inputs, owner=False)
        finally:
            self._task.settle()
        self._tell(force=True)

    def _files_to_start(self) -> Iterator[int]:
        """Inputs nobody has begun, largest first, so that the long ones do not come last."""
        sizes = [-item.text_bytes for item in self._plan.inputs]
        for item in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
            if self._journal.claim(f"{self._task.name}-{item:06d}"):
                yield item

    def _read_from(self, item: int, *, owner: bool) -> None:
        """Carry out unclaimed segments of one input. Its owner goes on to the end; a helper only takes segments
        that the input's size leads one to expect."""
        described = self._plan.inputs[item]
        expected = self._plan.expected_segments(described)
        reader: Reader | None = None
        segment = 0
        while owner or segment < expected:
            outcome = self._task.finished(item, segment)
            if outcome is None and self._journal.claim(f"{self._task.name}-{item:06d}-{segment:06d}"):
                if reader is None:
                    source = self._plan.prep.sources[described.source]
                    reader = Reader(described, source, self._plan.segment_bytes, segment)
                outcome = self._task.carry_out(reader, item, segment, partial(self._on_block, described))
                if outcome is None:
                    return
            if outcome is not None and outcome.last:
                return
            segment += 1

    def _on_block(self, item: Input, texts: Texts, tokens: int) -> None:
        harmless = sum(bad.kind in HARMLESS for bad in texts.bad)
        self.progress.documents += len(texts.texts)
        self.progress.quarantined += len(texts.bad) - harmless
        self.progress.harmless += harmless
        self.progress.text_bytes += texts.num_bytes
        self.progress.tokens += tokens
        self._refuse_hopeless(item)
        self._tell()

    def _refuse_hopeless(self, item: Input) -> None:
        """End early when this worker alone has met more bad records than the whole corpus may have."""
        done = self.progress
        if done.quarantined < 1000 or not self._plan.text_bytes:
            return
        records = (done.documents + done.quarantined) * max(
            1.0, self._plan.text_bytes / max(1, done.text_bytes)
        )
        if done.quarantined > _CERTAIN * self._plan.prep.max_bad_fraction * records:
            raise PrepError(
                f"{done.quarantined} bad records in the first {done.text_bytes / 1e6:.0f} MB, more than "
                f"prep.max_bad_fraction {self._plan.prep.max_bad_fraction:.3%} of the whole corpus allows: repair "
                f"the input, or raise the limit. The last were in {item.name}{describe_records(self._plan, item)}"
            )

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < _PROGRESS_SECONDS:
            return
        self._told = now
        self.progress.ended = time.time()
        self.progress.cpu_seconds = time.process_time() - self._cpu_before
        self.progress.peak_megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        part = self._progress_file.with_suffix(".part")
        with suppress(OSError):  # progress is for the eye; the records are the truth
            part.write_text(json.dumps(asdict(self.progress)), encoding="utf-8")
            part.replace(self._progress_file)
        if self._parent is not None and os.getppid() != self._parent:
            raise StoppedError("stopped because the process that started this worker is gone")
        if self._journal.failed():
            raise StoppedError("stopped because another process of this prep failed")


def total_progress(folder: Path, task: str) -> Progress:
    """The sum over the workers of an attempt; the first to begin, the last to end, the largest in memory."""
    total = Progress()
    for path in folder.glob(f"{task}-*.json"):
        try:
            one = Progress(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        total = Progress(
            documents=total.documents + one.documents,
            quarantined=total.quarantined + one.quarantined,
            harmless=total.harmless + one.harmless,
            text_bytes=total.text_bytes + one.text_bytes,
            tokens=total.tokens + one.tokens,
            began=min(total.began, one.began),
            ended=max(total.ended, one.ended),
            cpu_seconds=total.cpu_seconds + one.cpu_seconds,
            peak_megabytes=max(total.peak_megabytes, one.peak_megabytes),
        )
    return total
