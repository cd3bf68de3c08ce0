"""Where the ranks of a job meet: rank 0 takes the first port it can, the others find it there.

A port that was free when the job script looked may be taken when rank 0 listens. All ranks therefore know the same
candidates in the same order, and rank 0's bind decides. The others ask on each of them for this job, by a line that
only its rank 0 answers, and pass over whoever is silent or says something else. Candidates and clock bound the search.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from launchers.errors import LaunchError

ANSWER_SECONDS = 2.0
"""A listener that has not answered by then is somebody else."""
_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 1.0
_BACKLOG = 4096
_BEGIN = b"begin\n"
"""The last word to a rank: all are here, and the port now belongs to the store."""
_LONGEST_LINE = 512
_SHOWN = 16


def take_port(candidates: Sequence[int]) -> socket.socket:
    """A socket that listens on the first candidate that this machine can still give.

    Raises:
        LaunchError: all of them are taken.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in candidates:
        try:
            return socket.create_server(
                ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    shown = ", ".join(map(str, candidates))
    raise LaunchError(
        f"taken on this node, so that the ranks cannot meet: port {shown}. End what listens there, or give all ranks "
        "another port (MASTER_PORT; under SLURM or MPI CALM_SCALE_MASTER_PORT)"
    )


def welcome(listener: socket.socket, identity: str, world_size: int, seconds: float) -> None:
    """Rank 0: answer all ranks at once until every other one has asked. The socket goes on listening.

    ``seconds`` count from the arrival of the first rank, whichever that was.

    Raises:
        LaunchError: ranks are missing; names them.
    """
    asyncio.run(_Welcome(identity, world_size, seconds).serve(listener))
    listener.settimeout(None)


def find_port(address: str, candidates: Sequence[int], identity: str, rank: int, seconds: float) -> int:
    """Another rank: the candidate on which this job's rank 0 answers.

    Raises:
        LaunchError: it answers on none of them in time.
    """
    started = time.monotonic()
    pause = _POLL_SECONDS
    while (waited := time.monotonic() - started) < seconds:
        for port in candidates:
            if _asked(address, port, identity, rank, waited, seconds - waited):
                return port
        time.sleep(pause * random.uniform(0.5, 1.0))  # many ranks must not knock in step
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
    raise LaunchError(
        f"rank {rank}: rank 0 of this job answers on none of the ports {list(candidates)} of {address} after "
        f"{seconds:.0f} s. Has it started (its log says why not), and can this node reach {address}?"
    )


class _Welcome:
    """Rank 0's side of the meeting."""

    def __init__(self, identity: str, world_size: int, seconds: float) -> None:
        self._identity, self._world_size, self._seconds = identity, world_size, seconds
        self._missing = set(range(1, world_size))
        self._first_arrival = time.monotonic()
        self._news, self._together = asyncio.Event(), asyncio.Event()
        self._here: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(
            self._answer, sock=listener.dup(), limit=_LONGEST_LINE, backlog=_BACKLOG
        )
        async with server:
            while self._missing:
                left = self._first_arrival + self._seconds - time.monotonic()
                if left <= 0:
                    shown = ", ".join(map(str, sorted(self._missing)[:_SHOWN]))
                    raise LaunchError(
                        f"{len(self._missing)} of {self._world_size} ranks have not joined after "
                        f"{self._seconds:.0f} s: {shown}. Is the world size right, and did every node start?"
                    )
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
            server.close()  # before anybody is let go: what comes to this port from here on is for the store
            self._together.set()
            await asyncio.gather(*self._here)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Errors are those of somebody else, or of a rank that will ask again; cancelled is who never finished asking.
        with contextlib.suppress(OSError, ValueError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(ANSWER_SECONDS):
                is_rank = await self._talk(reader, writer)
            if is_rank and (task := asyncio.current_task()) is not None:
                self._here.add(task)
                await self._together.wait()
                writer.write(_BEGIN)
                await writer.drain()
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether it is a rank: it has asked for this job and heard the answer."""
        asked, rank, waited = (await reader.readline()).decode(errors="replace").rstrip("\n").rsplit(" ", 2)
        if asked != f"calm-scale {self._identity}":
            return False
        self._first_arrival = min(self._first_arrival, time.monotonic() - float(waited))
        writer.write(f"here {self._identity}\n".encode())
        await writer.drain()
        is_coming = await reader.readline() == b"coming\n"
        if is_coming:
            self._missing.discard(int(rank))
        self._news.set()
        return is_coming


def _asked(address: str, port: int, identity: str, rank: int, waited: float, left: float) -> bool:
    """Whether this job's rank 0 answers there; returns once all ranks are together, after ``left`` seconds at most."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=ANSWER_SECONDS) as connection,
    ):
        connection.sendall(f"calm-scale {identity} {rank} {waited:.1f}\n".encode())
        if _line(connection) == f"here {identity}":
            connection.sendall(b"coming\n")
            connection.settimeout(max(left, ANSWER_SECONDS))
            return _line(connection) == _BEGIN.decode().rstrip("\n")
    return False


def _line(connection: socket.socket) -> str:
    """One line without its end; what there is of it when the other side says no more."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _LONGEST_LINE:
        piece = connection.recv(1)
        if not piece:
            break
        text += piece
    return text.decode(errors="replace").rstrip("\n")


_LOWEST = 15_000
_EPHEMERAL_DEFAULT = 32_768
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_CANDIDATES = 16


def ephemeral_start() -> int:
    """First port the kernel may give to any outgoing connection."""
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_DEFAULT


def derive_ports(identity: str, count: int = NUM_CANDIDATES) -> list[int]:
    """Ports for a job, the same on every rank, in the order to try.

    ``identity`` is what all ranks share and other jobs do not (job id and step id). Consecutive job ids get
    ports far apart, so that neighbours on one node do not meet in their retries.
    """
    low, high = _LOWEST, ephemeral_start()
    if high <= low:  # a site that moved the ephemeral range down to almost nothing
        low, high = 1024, max(high, 1024 + count)
    span = high - low
    start = zlib.crc32(identity.encode())
    return [low + (start + attempt * 2_053) % span for attempt in range(min(count, span))]


def is_free(port: int, host: str = "") -> bool:
    """Whether this machine can listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def first_free(ports: Iterable[int]) -> int:
    """The first port of the list that is free here.

    Raises:
        LaunchError: none is.
    """
    tried = list(ports)
    for port in tried:
        if is_free(port):
            return port
    raise LaunchError(f"none of the {len(tried)} candidate ports is free on this node: {tried}")


class PortLease:
    """A free port that no other launcher on this machine is about to use.

    Between our look and rank 0's listen another launcher could look too. Each therefore first takes an
    abstract socket named after the port: the kernel frees it when the holder ends, however it ends.
    """

    def __init__(self, tries: int = 64) -> None:
        high = ephemeral_start()
        low = _LOWEST if high > _LOWEST else 1024
        for _ in range(tries):
            port = random.SystemRandom().randrange(low, max(high, low + 1))
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0calm-scale-port-{port}")
            except OSError:
                claim.close()
                continue
            if is_free(port):
                self.port, self._claim = port, claim
                return
            claim.close()
        raise LaunchError(f"no free port found between {low} and {high} in {tries} tries")

    def close(self) -> None:
        """Let others take the port."""
        self._claim.close()

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
