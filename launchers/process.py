"""Ranks as child processes: their cores, their logs, their end, and the verdict on a launch.

Each rank has its own process group and ends when its parent does: the kernel's parent-death signal ends the rank,
a guard process ends what the rank has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from calm_scale.config.errors import EXIT_REQUEUE

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


# Reads process-group numbers until its input closes: by `close` (the word "done" came first) or by the launcher's
# death (it did not). In a session of its own, so that a terminal's Ctrl-C does not end it first.
_PROGRAM = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
groups = []
for line in sys.stdin:
    if line.strip() == "done":
        sys.exit(0)
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Context manager; `watch` each rank's process group."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """End this process group if we die."""
        self._tell(str(group))

    def close(self) -> None:
        """All ranks have ended: nothing is left to guard."""
        self._tell("done")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Ended(Protocol):
    """A rank that has ended."""

    rank: int
    code: int | None

    def last_lines(self) -> list[str]: ...


@dataclass(frozen=True)
class Verdict:
    """``code`` is the launch's exit code; ``rank`` and the rest speak of the first failure, if any."""

    code: int
    rank: int | None = None
    node: str = ""
    lines: tuple[str, ...] = ()
    log: str = ""

    @classmethod
    def of(cls, first: Ended | None, ranks: Sequence[Ended]) -> Verdict:
        """Judge a launch: the first failing rank decides; else 75 if any rank asked for a requeue; else 0."""
        if first is None or first.code is None:
            return cls(EXIT_REQUEUE if any(rank.code == EXIT_REQUEUE for rank in ranks) else 0)
        log = getattr(first, "log", None)
        return cls(first.code, first.rank, socket.gethostname(), tuple(first.last_lines()), str(log or ""))

    @property
    def failed(self) -> bool:
        """Whether some rank failed (a wish to be requeued is no failure)."""
        return self.rank is not None

    @property
    def port_was_taken(self) -> bool:
        """Whether rank 0 could not listen on its rendezvous port."""
        return self.rank == 0 and any(_PORT_TAKEN.search(line) for line in self.lines)

    def text(self) -> str:
        """The verdict for people."""
        head = f"rank {self.rank} on {self.node} failed first: {describe(self.code)}"
        if not self.lines or not self.log:  # without a log of its own, what it said went to the terminal
            return f"{head}; its last lines are above"
        return "\n".join([f"{head}; its last lines ({self.log}):", *(f"  | {line}" for line in self.lines)])


def describe(code: int) -> str:
    """An exit code in words."""
    if code > 128 and code - 128 in signal.valid_signals():
        name = signal.Signals(code - 128).name
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}"
    return f"exit code {code}"


_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_cores() -> int:
    """Cores this process may use, at least 1: its affinity mask, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(cores, round(quota)) if quota else cores)


def cores_per_rank(local_world_size: int, env: Mapping[str, str] | None = None) -> int:
    """Cores one rank may use, at least 1.

    Two ranks with two OpenMP threads each on two cores run up to ten times slower than with one each.
    ``SLURM_CPUS_PER_TASK`` is this task's own share already; without it the node's cores are divided.
    """
    source = os.environ if env is None else env
    cores = available_cores()
    own = source.get("SLURM_CPUS_PER_TASK", "")
    if own.isdigit() and int(own) > 0 and "SLURM_STEP_ID" in source:
        return max(1, min(int(own), cores))
    return max(1, cores // max(1, local_world_size))


def _quota() -> float | None:
    try:
        limit, period = _CGROUP_V2.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us, period_us = (int(path.read_text()) for path in _CGROUP_V1)
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None
