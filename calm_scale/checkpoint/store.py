"""CheckpointStore: a checkpoint is complete or absent, and all ranks agree on which."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from calm_scale.checkpoint.card import Card, mark_suspect
from calm_scale.checkpoint.errors import (
    CheckpointError,
    DiskFullError,
    NothingToResumeError,
    SaveError,
    is_disk_full,
)
from calm_scale.checkpoint.file_list import (
    CARD,
    DELETING,
    LATEST,
    MANIFEST,
    SHARDS,
    TMP,
    FileList,
    folder_name,
    step_folders,
    unfinished,
    write_text,
)
from calm_scale.checkpoint.judge import (
    EVERY_BYTE,
    Entry,
    changed_share,
    inventory,
    judge,
    resumable,
    summary,
)
from calm_scale.checkpoint.retention import check_space, human_bytes, superfluous
from calm_scale.checkpoint.saving import Save, Start
from calm_scale.config.training import CheckpointConfig
from launchers.ranks import see_alike, see_shares

if TYPE_CHECKING:
    from calm_scale.runtime.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint that every rank has verified, and the newer ones it was preferred to, with reasons."""

    path: Path
    card: Card
    passed_over: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps it holds."""
        return self.card.step

    @property
    def shards(self) -> Path:
        """The folder that the engine loads."""
        return self.path / SHARDS


class CheckpointStore:
    """Checkpoints of one stage of one run. Every rank holds one and makes every call, in the same order.

    The first rank looks at folders, names and sizes and tells the others. A rank reads its share of the bytes and
    writes its own files, so what it asks of the file system does not grow with the number of ranks.

    Args:
        root: ``<workdir>/<stage>/checkpoints``.
        world: the ranks that save and resume together.
        config: cadence and retention.
        run_id: whose checkpoints count here; None: everyone's.
        say: takes a line for people; called on the first rank only.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        config: CheckpointConfig,
        run_id: str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root, self.world, self.config, self.run_id = root, world, config, run_id
        self._say = say if world.is_first else lambda line: None
        self.saving: Save | None = None
        self.last_saved: int | None = None
        self._last_size: int | None = None
        self._verified: dict[Path, tuple[tuple[str, int, int], ...]] = {}
        self._removing: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(thread_name_prefix="checkpoint")
        self.rotation_due = False

    # Resuming

    def newest(self, step: int | None = None) -> Found | None:
        """The newest checkpoint that may be resumed and verifies on every rank; or exactly ``step``, suspect or not.

        None only when no step folder is there at all: then, and only then, the run may start from step 0.

        Raises:
            NothingToResumeError: step folders are there and none is usable, or ``step`` is not among the usable.
            LateFileError: the ranks go on seeing different folders or files.
        """
        self._await_newest()
        entries: list[Entry] = self._on_first(lambda: inventory(self.root, run_id=self.run_id))
        passed_over = [f"{e.path.name}: {e.reason}" for e in entries if e.state == "unfinished"]
        committed = sorted((e for e in entries if e.state != "unfinished"), key=lambda e: -e.step)
        for entry in committed:
            if step is not None and entry.step != step:
                continue
            judged = self.judge_together(entry)
            if judged.state == "complete" or (judged.state == "suspect" and step is not None):
                found = self._found(judged, passed_over)
                for line in passed_over:
                    self._say(f"passed over {line}")
                self._last_size, self.last_saved = judged.size, judged.step
                self.rotation_due = True  # the attempt before may have ended ahead of it
                return found
            passed_over.append(f"{entry.path.name}: {judged.reason}")
        self._nothing(step, committed, passed_over)
        return None

    def _await_newest(self) -> None:
        """Returns once all ranks see the same step folders, and each its share of the newest one's files."""
        see_alike(self.world, self.root, lambda: {path.name for _, path in step_folders(self.root)})
        folders = step_folders(self.root)
        if not folders:
            return
        _, newest = folders[-1]
        see_alike(self.world, newest, lambda: _card_and_list(newest))
        sizes = self._on_first(lambda: _sizes(newest))
        see_shares(self.world, newest, list(sizes), lambda mine: _whole(newest, mine, sizes))

    def judge_together(self, entry: Entry) -> Entry:
        """The verdict that holds for all ranks: the first looks at every size, each reads its share of the bytes.

        What was read through before and has not been written to since is not read again.
        """
        path, ranks = entry.path, self.world

        def look() -> tuple[Entry, bool]:
            judged, signature = _judge_if_there(entry, self.run_id), _signature(path)
            return judged, signature is not None and self._verified.get(path) == signature

        judged, known = self._on_first(look)
        if known or not judged.is_whole:
            return judged
        shares = ranks.everywhere(lambda: _changed(path, ranks))
        if faults := sorted({fault for share in shares for fault in share}):
            return replace(judged, state="damaged", reason=summary(faults), verified=False)
        self._remember(path)
        return judged

    def _remember(self, path: Path) -> None:
        """The files as they are now have been read through, or written by us."""
        if self.world.is_first and (signature := _signature(path)) is not None:
            self._verified[path] = signature

    def _found(self, entry: Entry, passed_over: list[str]) -> Found:
        if entry.card is None:  # a whole checkpoint has a card
            raise CheckpointError(f"{entry.path} has no card")
        return Found(entry.path, entry.card, tuple(passed_over))

    def _nothing(self, step: int | None, committed: list[Entry], passed_over: list[str]) -> None:
        if step is not None:
            usable = ", ".join(str(e.step) for e in reversed(resumable(committed))) or "none"
            raise NothingToResumeError(
                f"{self.root} has no usable step {step}. Complete steps: {usable}" + _lines(passed_over)
            )
        pointer = self._on_first((self.root / LATEST).exists)
        suspects = [str(e.step) for e in committed if e.state == "suspect"]
        if committed or pointer:
            raise NothingToResumeError(
                f"{self.root} holds checkpoints, but none that can be resumed; not starting again over them."
                + _lines(passed_over)
                + (f"\n  {LATEST} names a checkpoint that is gone" if pointer and not committed else "")
                + (f"\nTo resume a suspect one: --resume-step {' or '.join(suspects)}." if suspects else "")
                + "\nMove the folder away to start from step 0"
            )
        for line in passed_over:
            self._say(f"passed over {line}")

    # Saving

    def save(self, step: int, write: Start, card: Card) -> Path:
        """Writes, verifies, renames. ``write`` gets the shards folder, on every rank.

        Raises:
            SaveError: on every rank; the attempt left nothing behind.
        """
        self.begin(step, write, card, background=False)
        return self.finish()

    def begin(self, step: int, start: Start, card: Card, background: bool = True) -> None:
        """Starts a save; an earlier one is finished first. ``start`` may return a pending write."""
        if card.step != step:
            raise CheckpointError(f"the card of step {step} says step {card.step}")
        if self.saving is not None:
            self.finish()
        self._on_first(lambda: self._prepare(step))
        shards = self.root / (folder_name(step) + TMP) / SHARDS
        see_alike(self.world, shards.parent, lambda: {SHARDS} if shards.is_dir() else set())
        self.saving = Save(self.root, self.world, card, start, self._pool if background else None)

    @property
    def waiting(self) -> bool:
        """This rank still works on the save under way; ``advance`` may be called when no rank says so."""
        return self.saving is not None and not self.saving.ready

    def advance(self) -> None:
        """One phase further with the save under way, if any. Raises SaveError like ``save``."""
        if self.saving is None:
            return
        try:
            self.saving.advance()
        except SaveError:
            self.saving = None
            raise
        if self.saving.phase == "committed":
            self._committed(self.saving)

    def finish(self) -> Path:
        """Waits for the save under way and commits it. Raises SaveError like ``save``."""
        if self.saving is None:
            raise CheckpointError("no save is under way")
        save = self.saving
        while self.saving is not None:
            save.wait()
            self.advance()
        return save.path

    def close(self) -> None:
        """Commits what is under way and waits for folders that are being removed."""
        if self.saving is not None:
            self.finish()
        for removal in self._removing:
            removal.result()
        self._removing.clear()

    def _prepare(self, step: int) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for removal in self._removing:
                removal.result()  # its space counts
            check_space(self.root, self._last_size, step)
            name = folder_name(step)
            wreck, taken = self.root / (name + TMP), self.root / name
            if wreck.exists():
                self._say(f"removing {wreck.name}, the rest of an earlier save that was never completed")
                shutil.rmtree(wreck)
            if taken.exists():
                self._put_aside(taken, step)
            (wreck / SHARDS).mkdir(parents=True)
        except OSError as error:
            raise SaveError(
                f"step {step} not saved: {error.filename or self.root}: {error.strerror}"
            ) from error

    def _put_aside(self, taken: Path, step: int) -> None:
        """Frees the name of a step that is saved again. What was suspect is removed with the next rotation."""
        state = judge(taken, step, run_id=self.run_id, share=EVERY_BYTE).state
        if state == "suspect":
            taken.rename(taken.with_name(taken.name + DELETING))
            return
        kind = "damaged" if state == "damaged" else "replaced"
        aside = taken.with_name(f"{taken.name}.{kind}-{time.time_ns()}")
        taken.rename(aside)
        self._say(f"moved the {kind} {taken.name} aside to {aside.name}")

    def _committed(self, save: Save) -> None:
        self.saving, self.rotation_due = None, True
        self.last_saved, self._last_size = save.step, save.size
        self._remember(save.path)
        if self.world.is_first and not save.card.suspect:
            self._point_to(save.path.name)
        suspect = f"; suspect: {save.card.suspect}" if save.card.suspect else ""
        self._say(f"saved {save.path.name}, {human_bytes(save.size)}{suspect}")

    def _point_to(self, name: str) -> None:
        """The pointer is a convenience: whatever stands in its way, the save above is complete and counts."""
        try:
            write_text(self.root / LATEST, name + "\n")
        except OSError as error:
            self._say(f"{self.root / LATEST} not renewed ({error.strerror}); {name} is complete all the same")

    # Retention

    def rotate(self) -> None:
        """Applies the retention rules, if a save was committed since the last time and none is under way.

        Call it on every rank, and not before the newest checkpoint has proved good: a step that followed it was
        finite. Until then every older one stays.
        """
        if not self.rotation_due or self.saving is not None:
            return
        self.rotation_due = False
        entries: list[Entry] = self._on_first(lambda: inventory(self.root, run_id=self.run_id))
        judged = [self.judge_together(entry) for entry in entries if entry.state in ("complete", "suspect")]
        mine = {e.step: e.card.metrics.get(self.config.best_metric) for e in resumable(judged) if e.card}
        suspects = [e.step for e in judged if e.state == "suspect"]
        doomed = superfluous(mine, self.config, suspects)
        self._on_first(lambda: self._remove(doomed))

    def mark_suspect(self, first: int, reason: str) -> None:
        """Marks every complete checkpoint of this run from step ``first`` on; see ``card.mark_suspect``."""

        def mark() -> list[str]:
            doubtful = [e for e in resumable(inventory(self.root, run_id=self.run_id)) if e.step >= first]
            for entry in doubtful:
                mark_suspect(entry.path, reason)
            return [entry.path.name for entry in reversed(doubtful)]

        for name in self._on_first(mark):
            self._say(f"{name} is marked suspect: {reason}")

    def _remove(self, steps: list[int]) -> None:
        """Renamed first: a folder half removed must not look like a checkpoint."""
        doomed = [path for path in self.root.glob(f"step_*{DELETING}") if path.is_dir()]
        for path in unfinished(self.root):
            self._say(f"removing {path.name}, the rest of a save that was never completed")
            doomed.append(path)
        for step in steps:
            path = self.root / folder_name(step)
            self._verified.pop(path, None)
            doomed.append(path.rename(path.with_name(path.name + DELETING)))
        self._removing = [removal for removal in self._removing if not removal.done()]
        if doomed:
            self._removing.append(self._pool.submit(_remove_all, doomed))

    def _on_first(self, work: Callable[[], T]) -> T:
        """The first rank's result on every rank; its error on every rank too."""

        def told() -> T:
            try:
                return work()
            except OSError as error:
                kind = DiskFullError if is_disk_full(error) else CheckpointError
                raise kind(f"{error.filename or self.root}: {error.strerror}") from error

        return self.world.on_first(told)


def _remove_all(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _judge_if_there(entry: Entry, run_id: str | None) -> Entry:
    """By names and sizes; a folder that is not there any more is damaged."""
    try:
        return judge(entry.path, entry.step, run_id=run_id)
    except OSError as error:
        return replace(entry, state="damaged", reason=f"{entry.path}: {error.strerror}", verified=False)


def _card_and_list(folder: Path) -> set[str]:
    sizes = {name: _size(folder / name) for name in (CARD, MANIFEST)}
    return {f"{name} ({size} bytes)" for name, size in sizes.items() if size is not None}


def _sizes(folder: Path) -> dict[str, int]:
    """The files of a checkpoint; none where its list cannot be read."""
    try:
        return {entry.path: entry.size for entry in FileList.read(folder).files}
    except CheckpointError:
        return {}


def _whole(folder: Path, names: Sequence[str], sizes: dict[str, int]) -> set[str]:
    return {name for name in names if _size(folder / name) == sizes[name]}


def _size(path: Path) -> int | None:
    """None where this rank does not see it."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _changed(path: Path, ranks: World) -> list[str]:
    """What does not fit in this rank's share of the bytes; a folder that it does not see is such a fault."""
    try:
        return changed_share(path, (ranks.rank, ranks.world_size))
    except (CheckpointError, OSError) as error:
        return [f"{error} (rank {ranks.rank} on {socket.gethostname()})"]


def _signature(path: Path) -> tuple[tuple[str, int, int], ...] | None:
    """See ``FileList.signature``; None where a file is missing."""
    try:
        return FileList.read(path).signature(path)
    except (CheckpointError, OSError):
        return None


def _lines(items: list[str]) -> str:
    return "".join(f"\n  {item}" for item in items)
