"""One save from its folder to its name: write → list and fsync → verify → rename.

A save is a small state machine, so that the same code runs through at once (sync) or a piece per training step
(async). The pieces that take long (writing, fsync, checksums) run in the background then; what needs all ranks
together happens in ``advance``, which every rank calls once every rank is ``ready``.

Each rank flushes and sums up the files that it wrote itself: another node may not see them yet, and only the writer's
fsync covers them. The first rank alone looks at all files, so a rank's work does not grow with the number of ranks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import DiskFullError, SaveError, is_disk_full
from calm_scale.checkpoint.file_list import (
    CARD,
    SHARDS,
    TMP,
    FileEntry,
    FileList,
    checksum,
    folder_name,
    sync_folder,
)
from calm_scale.checkpoint.judge import Entry, judge, summary
from calm_scale.config.files import FILE_POLL_SECONDS, FILE_WAIT_VARIABLE, file_wait_seconds

if TYPE_CHECKING:
    from calm_scale.runtime.world import World

Names = list[str]
"""Files that a rank wrote, relative to the shards folder."""
Start = Callable[[Path], Names | Future[Names]]


class Save:
    """The save of one step on one rank.

    Args:
        start: writes the shards into a folder and returns this rank's names; may return a write under way.
        pool: where the files are listed and flushed in the background; None: in place.
    """

    def __init__(
        self, root: Path, world: World, card: Card, start: Start, pool: Executor | None = None
    ) -> None:
        self.root, self.world, self.card = root, world, card
        self.step = card.step
        self.tmp = root / (folder_name(self.step) + TMP)
        self.path = root / folder_name(self.step)
        self.phase: Literal["writing", "listing", "committed"] = "writing"
        self.size = 0
        self._pool = pool
        self._work: Future[Any] = self._begin(start)

    @property
    def ready(self) -> bool:
        """This rank has nothing more to do before the next ``advance``."""
        return self.phase == "committed" or self._work.done()

    def wait(self) -> None:
        """Blocks until this rank is ready; errors are raised by ``advance``, on all ranks together."""
        wait([self._work])

    def advance(self) -> None:
        """The next phase. Every rank calls it when all are ready.

        Raises:
            SaveError: on every rank, when any rank failed; what was written is gone then.
        """
        results = self._together()
        if self.phase == "writing":
            self.phase = "listing"
            seal = partial(self._seal, results[self.world.rank])
            self._work = self._pool.submit(seal) if self._pool is not None else _completed(seal)
        elif self.phase == "listing":
            self._commit([entry for share in results for entry in share])

    def _begin(self, start: Start) -> Future[Any]:
        started: Future[Any] = _completed(partial(start, self.tmp / SHARDS))
        write = None if started.exception() else started.result()
        return write if isinstance(write, Future) else started

    def _together(self) -> list[Any]:
        """Every rank's result, or one SaveError on every rank."""
        outcomes = self.world.everywhere(self._outcome)
        failed = [(rank, text, full) for rank, (_, text, full) in enumerate(outcomes) if text]
        if failed:
            self._fail([f"rank {rank}: {text}" for rank, text, _ in failed], any(full for *_, full in failed))
        return [result for result, _, _ in outcomes]

    def _outcome(self) -> tuple[Any, str, bool]:
        """This rank's result, or its fault (one line, and whether the disk is full)."""
        try:
            return self._work.result(), "", False
        except Exception as error:
            return None, f"{type(error).__name__}: {error}".split("\n")[0], is_disk_full(error)

    def _fail(self, faults: list[str], full: bool) -> NoReturn:
        self.world.on_first(lambda: shutil.rmtree(self.tmp, ignore_errors=True))
        kind = DiskFullError if full else SaveError
        reason = "no space left on the disk" if full else "writing failed"
        error = kind(
            f"step {self.step} not saved: {reason} ({summary(faults)}). "
            f"Nothing of it is left in {self.root}; older checkpoints are untouched"
        )
        error.shared_from = 0
        raise error

    def _seal(self, names: Names) -> list[FileEntry]:
        """This rank's files, flushed, with sizes and checksums."""
        found = []
        for name in names:
            path = self.tmp / SHARDS / name
            xxh3_64 = checksum(path, sync=True)
            found.append(FileEntry(f"{SHARDS}/{name}", path.stat().st_size, xxh3_64))
        return found

    def _commit(self, entries: list[FileEntry]) -> None:
        self._work = _completed(lambda: self._rename(entries) if self.world.is_first else None)
        self.size = self._together()[0]
        self.phase = "committed"

    def _rename(self, entries: list[FileEntry]) -> int:
        if not entries:
            raise SaveError("the engine wrote no file")
        self.card.write(self.tmp)
        card = self.tmp / CARD
        entries = [*entries, FileEntry(CARD, card.stat().st_size, checksum(card, sync=True))]
        FileList(tuple(sorted(entries, key=lambda entry: entry.path))).write(self.tmp)
        for folder in sorted(path for path in self.tmp.rglob("*") if path.is_dir()):
            sync_folder(folder)
        written = self._judge_when_visible()
        self._refuse_unnamed({entry.path for entry in entries})
        self.tmp.rename(self.path)
        sync_folder(self.root)
        return written.size

    def _judge_when_visible(self) -> Entry:
        """Waits for what the other ranks wrote: a shared file system may show it here later than there."""
        started = time.monotonic()
        while not (written := judge(self.tmp, self.step)).is_whole:
            waited = time.monotonic() - started
            if waited >= file_wait_seconds():
                raise SaveError(
                    f"{written.reason}, after {waited:.0f} s. The file system shows files late, or not on every node; "
                    f"set {FILE_WAIT_VARIABLE} to wait longer"
                )
            time.sleep(FILE_POLL_SECONDS)
        return written

    def _refuse_unnamed(self, named: set[str]) -> None:
        files = (p for p in (self.tmp / SHARDS).rglob("*") if p.is_file() and not p.name.startswith(".nfs"))
        there = {path.relative_to(self.tmp).as_posix() for path in files}
        if unnamed := sorted(there - named):
            raise SaveError(f"no rank says that it wrote {summary(unnamed)}")


def _completed(work: Callable[[], Any]) -> Future[Any]:
    """``work`` done in place; its result or its error is in the future."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
