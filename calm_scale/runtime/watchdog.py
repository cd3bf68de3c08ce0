"""Names what a rank is stuck in, and ends it: a job that hangs until its time limit wastes the whole allocation."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from calm_scale.config.errors import EXIT_STALLED


class Watchdog:
    """A thread that expects the operation to change within ``limit_seconds``.

    After half of that it says where the rank stands; at the limit it prints every thread's stack, calls
    ``on_stall`` and ends the process with ``EXIT_STALLED``.

    Args:
        limit_seconds: the longest an operation may take.
        place: who this is, e.g. ``lm rank 3 (tensor 1, pipeline 0, data 1)``.
        on_stall: last words before the end, e.g. a line in the ledger; gets the operation.
        end: ends the process; replaced in tests.
    """

    def __init__(
        self,
        limit_seconds: float,
        place: str,
        on_stall: Callable[[str], None] = lambda operation: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._limit, self._place, self._on_stall, self._end = limit_seconds, place, on_stall, end
        self._operation, self._since, self._own_limit = "start-up", time.monotonic(), limit_seconds
        self._failure: tuple[BaseException, str] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def doing(self, operation: str, limit_seconds: float | None = None) -> Iterator[None]:
        """The block is one operation; afterwards the surrounding one counts afresh.

        ``limit_seconds``: a shorter limit for this operation.
        """
        before, limit_before = self._operation, self._own_limit
        self._own_limit = self._limit if limit_seconds is None else min(limit_seconds, self._limit)
        self.note(operation)
        try:
            yield
        except BaseException as error:
            if self._failure is None or self._failure[0] is not error:
                self._failure = (error, operation)
            raise
        finally:
            self._own_limit = limit_before
            self.note(before)

    def operation_of(self, error: BaseException) -> str:
        """The innermost operation that this error ended; the present one if none did."""
        if self._failure is not None and self._failure[0] is error:
            return self._failure[1]
        return self._operation

    def introduce(self, place: str, on_stall: Callable[[str], None]) -> None:
        """Say more exactly who this is, and what the last words are, once that is known."""
        self._place, self._on_stall = place, on_stall

    def note(self, operation: str) -> None:
        """From now on this is what the rank does."""
        self._operation, self._since = operation, time.monotonic()

    def beat(self, grant: float = 0.0) -> None:
        """The operation makes progress: its time counts afresh, after ``grant`` seconds that it has of its own."""
        self._since = time.monotonic() + grant

    def close(self) -> None:
        """Watches no longer."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        warned_since = 0.0
        while not self._stop.wait(min(1.0, self._limit / 10)):
            since, operation, limit = self._since, self._operation, self._own_limit
            waited = time.monotonic() - since
            if waited >= limit:
                self._give_up(operation, waited)
                return
            if waited >= limit / 2 and warned_since != since:
                warned_since = since
                self._print(f"in `{operation}` for {waited:.0f} s; ends at {limit:.0f} s")

    def _give_up(self, operation: str, waited: float) -> None:
        self._print(f"stalled: in `{operation}` for {waited:.0f} s. Where every thread is:")
        with contextlib.suppress(Exception):  # a captured stderr has no file number
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        with contextlib.suppress(Exception):
            self._on_stall(operation)
        self._end(EXIT_STALLED)

    def _print(self, text: str) -> None:
        print(f"{self._place}: {text}", file=sys.stderr, flush=True)
