"""One command at a time: exclusive use of a folder, also on file systems without locks and across machines.

Two things are held together. The kernel's lock on the lock file ends with the process, however it ends; but some file
systems have none, and on others (NFS without lockd, Lustre with ``localflock``) it is known to one machine only. So a
claim file beside it, ``<lock file>.<number>``, says which process of which machine is at work, and its time of change
is the sign of life.

A claim is created exclusively (O_EXCL). It is stale when its process is gone (same machine) or gave no sign for
``STALE_SECONDS`` (another machine), by the file system's own clock. Whoever takes over a stale claim creates the next
number, so of several only one can; whoever then finds another live claim gives its own up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from calm_scale.config.errors import EXIT_ERROR, CalmScaleError

HEARTBEAT_SECONDS = 10.0
"""How often a holder gives a sign of life."""
STALE_SECONDS = 120.0
"""A claim of another machine without a sign for so long is taken over; attribute caches are up to 60 s behind."""
NOTICE_SECONDS = 2.0
"""A process that waits longer prints the holder."""
_POLL_SECONDS = 0.2
_HELD: set[str] = set()
"""Tokens of the claims that this process holds."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Holder:
    """A process as its claim names it. ``machine`` and ``started`` tell it from its namesakes; ``since`` is a date."""

    host: str
    pid: int
    since: str
    machine: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """Whether it is or was a process of this machine, so that its number shows whether it is alive."""
        return self.machine == _machine()

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, also when it is stopped; for a process of this machine."""
        if self.pid == os.getpid():
            return self.token in _HELD  # a claim that this process failed to remove is not held
        started = _start_of(self.pid)
        return started is not None and started == self.started


class OccupiedError(CalmScaleError):
    """Another process uses the folder. ``holder`` names it as well as is known."""

    may_pass = True

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(path, holder)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        return f"{self.path.parent} is in use by {self.holder}; wait for it, or end it first"


@contextlib.contextmanager
def exclusive(
    path: Path,
    *,
    patience: float | None = 0.0,
    create: bool = True,
    mode: int | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the lock file ``path`` for the duration of the block; its folder exists.

    Args:
        patience: seconds to wait for another holder, None: as long as it lives. A claim of another machine is watched
            until a sign of life is seen or it is stale, also beyond these seconds.
        create: whether the lock file is made where there is none.
        mode: permissions of the lock file, set where this user may.
        on_lost: called with a message when another machine has taken over, because this process gave no sign for
            ``STALE_SECONDS``. By default it ends the process, so that two do not write into one folder.

    Raises:
        OccupiedError: another process holds it.
        FileNotFoundError: there is no lock file and ``create`` is off, or it was removed meanwhile.
        OSError: the folder can be neither locked nor written to.
    """
    with path.open("a" if create else "r+", encoding="utf-8") as file:
        if mode is not None:
            with contextlib.suppress(OSError):  # another user's, who has done this
                os.fchmod(file.fileno(), mode)
        claim = _Waiting(path, file, patience).take()
        pulse = _Pulse(claim, on_lost or _end_process)
        try:
            yield
        finally:
            pulse.stop()
            claim.release()


class _Claim:
    """This process's claim file; ``path`` is None where none could be written and the kernel's lock holds alone."""

    def __init__(self, lock_file: Path, path: Path | None, me: Holder) -> None:
        self.lock_file, self.path, self.me = lock_file, path, me

    def renew(self) -> str:
        """Renew the claim; a message when another process has taken over, else an empty string."""
        if self.path is None:
            return ""
        try:
            os.utime(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or not self.lock_file.parent.is_dir():
                return ""
            others = [claim for claim in _claims(self.lock_file) if claim.shows_life]
            if others:
                return (
                    f"{self.lock_file.parent} was taken over by {others[-1].who}, because this process gave no sign "
                    f"of life for {STALE_SECONDS:.0f} s; it ends here, so that two do not write into one folder"
                )
            with contextlib.suppress(OSError):
                _create(self.path, self.me)
        return ""

    def release(self) -> None:
        """Remove the claim file, unless another process owns it by now."""
        _HELD.discard(self.me.token)
        if self.path is not None and self.me.pid == os.getpid():
            found = _read(self.path)
            if found is not None and (found.holder is None or found.holder.token == self.me.token):
                self.path.unlink(missing_ok=True)


class _Pulse:
    """A thread that renews a claim until it is stopped."""

    def __init__(self, claim: _Claim, on_lost: Callable[[str], None]) -> None:
        self._claim, self._on_lost = claim, on_lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            if lost := self._claim.renew():
                self._on_lost(lost)
                return

    def stop(self) -> None:
        """Stop renewing."""
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True)
class _Found:
    """A claim file as it was read: its number, time of change, age by the file system's clock, holder (None: not
    readable)."""

    path: Path
    number: int
    changed: float
    age: float
    holder: Holder | None

    @property
    def who(self) -> str:
        return str(self.holder) if self.holder else "another process"

    @property
    def is_here(self) -> bool:
        return self.holder is not None and self.holder.is_here

    @property
    def shows_life(self) -> bool:
        """Not stale."""
        if self.holder is not None and self.holder.is_here:
            return self.holder.is_alive
        return self.age <= STALE_SECONDS


class _Waiting:
    """Takes a lock file, waiting for its holder as long as allowed."""

    def __init__(self, path: Path, file: IO[str], patience: float | None) -> None:
        self._path, self._file, self._patience = path, file, patience
        self._started = time.monotonic()
        self._told = False
        self._first_seen: dict[Path, float] = {}

    def take(self) -> _Claim:
        while True:
            locked = _lock(self._file)
            if not self._path.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            if locked is not False:
                claim = self._claim(locked is True)
                if claim is not None:
                    return claim
                if locked:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            self._wait_or_refuse(kernel_says_busy=locked is False)

    def _claim(self, locked: bool) -> _Claim | None:
        """The claim file of this process; None when another process has one, or took it in the same moment."""
        before = _claims(self._path)
        if any(claim.shows_life for claim in before):
            return None
        me = _this_process()
        mine = _numbered(self._path, max((claim.number for claim in before), default=-1) + 1)
        _HELD.add(me.token)
        try:
            _create(mine, me)
        except FileExistsError:
            return None
        except OSError as error:
            if locked and error.errno in _NOT_WRITABLE:
                return _Claim(self._path, None, me)
            raise
        if any(claim.path != mine and claim.shows_life for claim in _claims(self._path)):
            mine.unlink(missing_ok=True)
            time.sleep(random.uniform(0, _POLL_SECONDS))
            return None
        for stale in before:
            with contextlib.suppress(OSError):  # another user's: stale it stays
                stale.path.unlink(missing_ok=True)
        return _Claim(self._path, mine, me)

    def _wait_or_refuse(self, kernel_says_busy: bool) -> None:
        claims = [claim for claim in _claims(self._path) if claim.shows_life]
        if not claims and not kernel_says_busy:
            return  # released, or taken by somebody who gave it up: try again
        who = claims[-1].who if claims else "another process"
        waited = time.monotonic() - self._started
        certain = kernel_says_busy or any(self._is_certain(claim) for claim in claims)
        if certain and self._patience is not None and waited >= self._patience:
            raise OccupiedError(self._path, who)
        if waited >= NOTICE_SECONDS and not self._told:
            self._told = True
            how = "" if certain else " until it gives a sign of life or is given up"
            sys.stderr.write(f"{self._path.parent} is in use by {who}; waiting for it{how}\n")
            sys.stderr.flush()
        time.sleep(_POLL_SECONDS if certain else 5 * _POLL_SECONDS)

    def _is_certain(self, claim: _Found) -> bool:
        """Whether the holder lives for certain: it is here, or its sign of life was renewed while we watched."""
        return claim.is_here or self._first_seen.setdefault(claim.path, claim.changed) != claim.changed


def _lock(file: IO[str]) -> bool | None:
    """Whether the kernel gave this process the lock; None: the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _claims(path: Path) -> list[_Found]:
    """The claim files beside a lock file, lowest number first."""
    names = [other.name for other in path.parent.iterdir() if other.name.startswith(f"{path.name}.")]
    numbers = sorted(int(end) for name in names if (end := name.removeprefix(f"{path.name}.")).isdigit())
    found = [_read(_numbered(path, number)) for number in numbers]
    present = [claim for claim in found if claim is not None]
    if all(claim.is_here for claim in present):
        return present
    now = _file_system_time(path)
    return [
        _Found(claim.path, claim.number, claim.changed, now - claim.changed, claim.holder)
        for claim in present
    ]


def _read(path: Path) -> _Found | None:
    """A claim file without its age; opened first, which makes a network file system look again. None: gone."""
    try:
        with path.open("rb") as file:
            changed = os.fstat(file.fileno()).st_mtime
            text = file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    holder: Holder | None = None
    with contextlib.suppress(ValueError, TypeError):  # written to just now, or on a full disk
        holder = Holder(**json.loads(text))
    return _Found(path, int(path.suffix[1:]), changed, 0.0, holder)


def _file_system_time(path: Path) -> float:
    """Now, by the clock that dates the claims: the time of change of a file changed now."""
    mark = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        mark.touch()
        return mark.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def _create(path: Path, me: Holder) -> None:
    """Create a claim file that does not exist yet. A full disk leaves it empty, which still counts as a claim."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file, contextlib.suppress(OSError):
        file.write(json.dumps(asdict(me)))
        file.flush()


def _this_process() -> Holder:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Holder(socket.gethostname(), pid, since, _machine(), _start_of(pid) or "", uuid.uuid4().hex)


def _machine() -> str:
    """Equal for two processes that see each other's numbers: one boot of one kernel, one namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When the process was started, in ticks since the boot; None when it is gone (or only waits to be reaped)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _end_process(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(EXIT_ERROR)
