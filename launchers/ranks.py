"""The ranks of a job and what they do together: one rank's error becomes the same message on every rank.

Nobody is left waiting: ``on_first`` and ``everywhere`` are the only places where that happens.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from calm_scale.config.errors import EXIT_USAGE, CalmScaleError, ConfigError, first_cause
from calm_scale.config.files import (
    FILE_NOTICE_SECONDS,
    FILE_POLL_SECONDS,
    FILE_WAIT_VARIABLE,
    LateFileError,
    file_wait_seconds,
)

T = TypeVar("T")
HEARTBEAT_SECONDS = 0.5
"""How often ranks that wait patiently tell each other that they are alive."""
Beat = Callable[[], object]
_Sent = tuple[bool, bytes]
"""Whether it is an error, and the pickled error or list of results."""


@dataclass(frozen=True)
class Ranks(ABC):
    """The processes of a job, as one of them sees it: torch's (``World``), MPI's, or this one alone."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """The rank that prints, renames and writes what belongs to the whole job."""
        return self.rank == 0

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """``[world_size]`` values in rank order, on every rank."""

    @abstractmethod
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank ``source``'s value on every rank."""

    @abstractmethod
    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks."""

    def on_first(self, work: Callable[[], T], *, patience: Beat | None = None) -> T:
        """The first rank's result on every rank. Every rank calls it, only the first one works.

        Args:
            patience: for work that may outlast a collective's time limit: called on every rank twice a second.

        Raises:
            CalmScaleError: on every rank, whatever the first one raised. Alone, the error itself.
        """
        mine = _run(self, work if self.is_first else None, patience)
        if self.world_size == 1:
            return _take(mine)[0]
        sent: _Sent = self.broadcast_object(_pack(mine, self.rank) if self.is_first else None)
        result: T = _unpack(self.rank, mine, [sent])[0]
        return result

    def everywhere(self, work: Callable[[], T], *, patience: Beat | None = None) -> list[T]:
        """Every rank's result in rank order, on every rank; for ``patience`` see ``on_first``.

        Raises:
            CalmScaleError: on every rank, the error of the lowest rank that failed by itself, with ``patience`` as
                soon as one has; an unexpected one with the rank's number, its traceback on that rank's stderr.
                Alone, the error itself.
        """
        mine = _run(self, work, patience)
        if self.world_size == 1:
            return _take(mine)
        return _unpack(self.rank, mine, self.gather_objects(_pack(mine, self.rank)))


@dataclass(frozen=True)
class Alone(Ranks):
    """A job of one process."""

    rank: int = 0
    world_size: int = 1

    def gather_objects(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value itself."""
        return value

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        return list(values)


@dataclass
class _Outcome(Generic[T]):
    """What work has come to so far on this rank."""

    results: list[T] = field(default_factory=list)
    error: Exception | None = None

    def run(self, work: Callable[[], T]) -> None:
        try:
            self.results.append(work())
        except Exception as error:
            self.error = error


def _run(ranks: Ranks, work: Callable[[], T] | None, patience: Beat | None) -> _Outcome[T]:
    """What ``work`` comes to here; with ``patience`` it runs in a thread while the ranks keep in touch, so that no
    collective runs into its time limit and every rank ends as soon as one has failed."""
    if patience is not None:
        return _run_patiently(ranks, work, patience)
    mine = _Outcome[T]()
    if work is not None:
        mine.run(work)
    return mine


def _run_patiently(ranks: Ranks, work: Callable[[], T] | None, beat: Beat) -> _Outcome[T]:
    outcome = _Outcome[T]()
    thread = threading.Thread(
        target=outcome.run if work else lambda: None, args=(work,) if work else (), daemon=True
    )
    thread.start()
    while True:
        thread.join(HEARTBEAT_SECONDS if work else 0)
        failed, busy = ranks.maximum([int(outcome.error is not None), int(thread.is_alive())])
        beat()
        if failed or not busy:
            return outcome


def _take(mine: _Outcome[T]) -> list[T]:
    if mine.error is not None:
        raise mine.error
    return mine.results


def _pack(outcome: _Outcome[T], rank: int) -> _Sent:
    """Bytes that every rank can read, whatever the work returned or raised."""
    if outcome.error is None:
        try:
            return False, pickle.dumps(outcome.results)
        except Exception as error:
            outcome.error = error
    shared = _for_people(outcome.error, rank)
    shared.shared_from = rank
    if shared is not outcome.error:
        shared.__cause__ = outcome.error
        outcome.error = shared
    return True, _pickled(shared)


def _unpack(rank: int, mine: _Outcome[T], everyone: list[_Sent]) -> list[T]:
    """All results; or the error of the lowest rank that has a cause to show, on its own rank the very object."""
    errors: list[CalmScaleError] = [pickle.loads(content) for failed, content in everyone if failed]
    if errors:
        error = first_cause(errors)
        if error.shared_from != rank or mine.error is None:
            raise error
        if type(mine.error) is CalmScaleError and mine.error.__cause__ is not None:
            sys.stderr.write("".join(traceback.format_exception(mine.error.__cause__)))
        raise mine.error
    return [result for _, content in everyone for result in pickle.loads(content)]


def _for_people(error: Exception, rank: int) -> CalmScaleError:
    if isinstance(error, CalmScaleError):
        return error
    return CalmScaleError(f"rank {rank} on {socket.gethostname()}: {type(error).__name__}: {error}")


def _pickled(error: CalmScaleError) -> bytes:
    """The error, or one of the same text and exit code where its class cannot be read back."""
    try:
        content = pickle.dumps(error)
        copy = pickle.loads(content)
        if type(copy) is type(error) and str(copy) == str(error):
            return content
    except Exception:
        pass
    kind = ConfigError if error.exit_code == EXIT_USAGE else CalmScaleError
    plain = kind(str(error))
    plain.shared_from, plain.is_consequence = error.shared_from, error.is_consequence
    return pickle.dumps(plain)


def see_alike(ranks: Ranks, folder: Path, look: Callable[[], set[str]]) -> None:
    """Return once ``look`` (what this rank sees of ``folder``) is the same on every rank. Every rank calls it.

    What no rank sees is not waited for. All that is seen goes to every rank: for a few files.

    Raises:
        LateFileError: on every rank, when the time is up; names a file, a rank that sees it and one that does not.
    """

    def find_late(views: list[set[str]]) -> _Late | None:
        everything = set[str]().union(*views)
        late = sorted((name, rank) for rank, seen in enumerate(views) for name in everything - seen)
        if not late:
            return None
        name, blind = late[0]
        return name, next(rank for rank, seen in enumerate(views) if name in seen), blind

    _wait_for_late(ranks, folder, look, find_late)


def see_shares(
    ranks: Ranks, folder: Path, names: Sequence[str], look: Callable[[Sequence[str]], set[str]]
) -> None:
    """Return once each rank sees of its share of ``names`` what the first rank sees of it. Every rank calls it.

    The first rank looks at all of them, every other one at each ``world_size``-th: its work does not grow with the
    number of ranks.

    Args:
        names: in ``folder``, the same on every rank.
        look: those of the given names that this rank sees.

    Raises:
        LateFileError: as ``see_alike``.
    """
    size = ranks.world_size
    mine = names if ranks.is_first else names[ranks.rank :: size]

    def find_late(views: list[set[str]]) -> _Late | None:
        for place, name in enumerate(names):
            sharer = place % size
            if (name in views[0]) != (name in views[sharer]):
                return (name, 0, sharer) if name in views[0] else (name, sharer, 0)
        return None

    _wait_for_late(ranks, folder, lambda: look(mine), find_late)


_Late = tuple[str, int, int]
"""A file, a rank that sees it, and one that does not yet."""


def _wait_for_late(
    ranks: Ranks,
    folder: Path,
    look: Callable[[], set[str]],
    find_late: Callable[[list[set[str]]], _Late | None],
) -> None:
    limit, started, told = file_wait_seconds(), time.monotonic(), False
    while True:
        views = ranks.everywhere(lambda: (socket.gethostname(), look()))
        late = find_late([seen for _, seen in views])
        if late is None:
            return
        name, sees, blind = late
        what = f"{folder / name}: rank {sees} on {views[sees][0]} sees it, rank {blind} on {views[blind][0]} does not"
        waited = ranks.broadcast_object(time.monotonic() - started)
        if waited >= limit:
            error = LateFileError(
                f"{what}, after {limit:g} s. The file system shows files late, or not on every node; set "
                f"{FILE_WAIT_VARIABLE} to wait longer"
            )
            error.shared_from = 0  # every rank has it: the first one speaks
            raise error
        if waited >= FILE_NOTICE_SECONDS and not told:
            told = True
            if ranks.is_first:
                sys.stderr.write(f"{what} yet; waiting up to {limit:g} s ({FILE_WAIT_VARIABLE})\n")
                sys.stderr.flush()
        time.sleep(FILE_POLL_SECONDS)


def files_under(folder: Path, root: Path | None = None) -> set[str]:
    """Every file below ``folder`` with its size, named relative to ``root``; empty when there is no folder."""
    root = root or folder
    seen: set[str] = set()
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            if path.is_file():
                seen.add(f"{path.relative_to(root)} ({path.stat().st_size} bytes)")
        except OSError:
            continue  # gone, or not there yet
    return seen
