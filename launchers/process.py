"""One rank as a child process: its own process group, its own log, dead when its parent is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
NUM_LAST_LINES = 20


class RankProcess:
    """A started rank. ``code`` is None while it runs, then its exit code, 128 + n when signal n ended it.

    A rank that keeps the terminal writes to ours: on a terminal directly, otherwise its stderr passes through us
    so that the verdict can quote it.
    """

    def __init__(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], log: Path, keeps_terminal: bool
    ) -> None:
        self.rank, self.log = rank, None if keeps_terminal else log
        self.code: int | None = None
        self._tail: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._reader: threading.Thread | None = None
        capture = keeps_terminal and not sys.stderr.isatty()
        sink = None if keeps_terminal else log.open("ab", buffering=0)
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=None if keeps_terminal else subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.PIPE if capture else sink,
                process_group=0,
                close_fds=False,  # a file that the shell opened for the command: its process substitution, say
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - one prctl call, looked up before the fork
            )
        finally:
            if sink is not None:
                sink.close()
        self.pid = self._process.pid
        if capture and self._process.stderr is not None:
            self._reader = threading.Thread(target=self._relay, args=(self._process.stderr,), daemon=True)
            self._reader.start()

    def poll(self) -> int | None:
        """Reap if it has ended; what it left behind in its group ends with it."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = code if code >= 0 else 128 - code
            self.kill_group()
            if self._reader is not None:
                self._reader.join(timeout=2)
        return self.code

    def send(self, number: signal.Signals) -> None:
        """A signal to the rank itself, not to its helpers (data workers die of USR1)."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End the rank and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        """The end of what it said, as far as we saw it."""
        if self.log is None:
            return list(self._tail)
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                return file.read().decode(errors="replace").splitlines()[-NUM_LAST_LINES:]
        except OSError:
            return []

    def _relay(self, pipe: IO[bytes]) -> None:
        out = getattr(sys.stderr, "buffer", None)
        for line in pipe:
            self._tail.append(line.decode(errors="replace").rstrip("\n"))
            if out is not None:
                out.write(line)
                out.flush()
            else:
                sys.stderr.write(line.decode(errors="replace"))


def wait_for_any(ranks: Sequence[RankProcess], seconds: float) -> None:
    """Return as soon as one of the ranks ends, so that the first to fail is seen as the first; or after a while."""
    poller = select.poll()
    handles: list[int] = []
    try:
        for rank in ranks:
            with contextlib.suppress(OSError, AttributeError):
                handles.append(os.pidfd_open(rank.pid))
                poller.register(handles[-1], select.POLLIN)
        poller.poll(seconds * 1000)
    finally:
        for handle in handles:
            os.close(handle)


def _die_with(parent: int) -> Callable[[], None]:
    """What a child runs before its command: ask the kernel to kill it when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died in between
                os._exit(128 + signal.SIGKILL)

    return prepare
