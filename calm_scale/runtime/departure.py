"""How a rank joins, is asked to stop, and leaves: in bounded time, or at once with the reason printed and recorded.

Taking NCCL's process groups down while another rank is in a collective blocks both. A rank that fails therefore
cleans nothing up: it prints and records why, and its process ends. The others are ended by whoever started them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from calm_scale.config.errors import EXIT_ERROR, EXIT_OK, CalmScaleError
from calm_scale.config.run_folder import StageFolder
from calm_scale.record.json_lines import append_lines
from calm_scale.runtime.watchdog import Watchdog
from calm_scale.runtime.world import JOIN_SECONDS, Device, World, init_world
from launchers import environment
from launchers.errors import tell_job_script

CLEAN_UP_SECONDS = 20.0
"""What a rank may take to end after its work or its failure: for the process groups, and for the rest."""
SPEAK_SECONDS = 5.0
"""How long the other ranks let the first one say what all of them end with, before whoever started them ends it."""


class Departure:
    """One rank's stay in a job, from joining to its end.

    Args:
        what: what the ranks do, for messages, e.g. ``lm``.
        watchdog: watches over start-up, work and clean-up.
        folder: where ``failures.jsonl`` goes; None records nothing.

    Attributes:
        world: the ranks; set as soon as they have joined.
        exit_code: with which the process ends when its clean-up does not.
    """

    def __init__(self, what: str, watchdog: Watchdog, folder: Path | None = None) -> None:
        self.what, self.watchdog, self.exit_code = what, watchdog, EXIT_OK
        self.world: World
        self._folder = folder
        self._told = False

    def failed(self, error: BaseException, step: int | None = None) -> None:
        """Print and record why this rank fails, at once and only once; its process ends in bounded time.

        Of an error that all ranks share the first rank speaks, and the others leave after it with the same exit code.
        Alone, nothing waits for this rank: the error goes its normal way.
        """
        facts = environment.facts()
        if self._told or facts.world_size == 1 or isinstance(error, SystemExit):
            return
        self._told = True
        self.exit_code = error.exit_code if isinstance(error, CalmScaleError) else EXIT_ERROR
        _end_within(CLEAN_UP_SECONDS, self.exit_code)
        shared_from = error.shared_from if isinstance(error, CalmScaleError) else None
        if isinstance(error, CalmScaleError) and shared_from in (None, facts.rank):
            tell_job_script(error)
        if shared_from is None or facts.rank == 0:
            self._tell(error, step, facts.rank if shared_from is None else shared_from)
        if shared_from is not None:
            _within(SPEAK_SECONDS, self.world.barrier)

    def _tell(self, error: BaseException, step: int | None, rank: int) -> None:
        after = "" if step is None else f" after step {step}"
        where = f"{self.what} rank {rank}: failed in `{self.watchdog.operation_of(error)}`{after}"
        if isinstance(error, CalmScaleError):
            said = f"error: {error}\n"
        else:
            said = "".join(traceback.format_exception(error))
            said += f"{where}: {type(error).__name__}: {error}\n"
        with contextlib.suppress(OSError):
            sys.stderr.write(said)
            sys.stderr.flush()
        if self._folder is not None and self._folder.is_dir():
            row = {
                "time": time.time(),
                "stage": self.what,
                "rank": rank,
                "step": step,
                "operation": self.watchdog.operation_of(error),
                "error": f"{type(error).__name__}: {error}",
            }
            with contextlib.suppress(OSError):
                append_lines(StageFolder(self._folder).failures, [json.dumps(row)])

    def leave(self) -> NoReturn:
        """End this process now, whatever its threads and process groups are doing."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.exit_code)


@contextlib.contextmanager
def joined(
    what: str,
    folder: Path | None = None,
    limit_seconds: float = math.inf,
    device: Device = "auto",
    join_seconds: float | None = None,
) -> Iterator[Departure]:
    """Join the job's ranks for the block; see the module for how a rank leaves it.

    Args:
        what: for messages, e.g. ``lm``.
        folder: the run's folder of this stage, which gets ``failures.jsonl``.
        limit_seconds: the watchdog's limit for one operation, start-up and clean-up among them; default none.
        device, join_seconds: see ``init_world``.

    Raises:
        WorldError, LaunchError: the ranks did not come together.
        BaseException: of the block, where this process is alone. As one of several it does not return.
    """
    watchdog = Watchdog(limit_seconds, f"{what} rank {environment.facts().rank}")
    departure = Departure(what, watchdog, folder)
    try:
        with watchdog.doing("joining"):
            watchdog.beat(grant=JOIN_SECONDS if join_seconds is None else join_seconds)
            world = departure.world = init_world(device, join_seconds=join_seconds)
        yield departure
        with watchdog.doing("leaving"):
            _close(world, departure)
    except BaseException as error:
        departure.failed(error)
        if environment.facts().world_size > 1:
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                departure.exit_code = error.code
            departure.leave()
        raise
    finally:
        watchdog.close()


def _close(world: World, departure: Departure) -> None:
    """Take the process groups down. Where that blocks, go on without, and see to it that the process ends."""
    if not _within(CLEAN_UP_SECONDS, world.close):
        sys.stderr.write(
            f"{departure.what} rank {world.rank}: the process groups did not close within {CLEAN_UP_SECONDS:.0f} s; "
            "ending without\n"
        )
        _end_within(CLEAN_UP_SECONDS, departure.exit_code)


def _within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether ``work`` came to an end in time; it goes on without us where it did not."""

    def run() -> None:
        with contextlib.suppress(Exception):  # another rank has gone already
            work()

    thread = threading.Thread(target=run, name="leaving", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _end_within(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT = 3
"""That many Ctrl-C end the process without a checkpoint."""


def ignore_stop_signals() -> None:
    """For a process that has nothing left to do but to end: its exit code stands."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """Remembers the first stop signal. Later ones change nothing, except a third Ctrl-C.

    Use as a context manager, or call ``install`` and ``restore``. Installing again (after a library put its own
    handlers there) is fine. Without ``restore`` they stay until the process is gone: Python gives signals their
    default effect back while it shuts down, so a second SIGTERM would turn exit code 75 into 143.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """``SIGTERM``, …, or empty."""
        return signal.Signals(self.received).name if self.received else ""

    def install(self) -> StopSignals:
        """Takes the signals over. Main thread only."""
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._handle)
            if before != self._handle:
                self._before.setdefault(number, before)
        atexit.unregister(ignore_stop_signals)
        atexit.register(ignore_stop_signals)
        return self

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        atexit.unregister(ignore_stop_signals)
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= IMPATIENT:
                raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
