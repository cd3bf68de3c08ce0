"""Where the ranks of a job meet: rank 0 takes the first port it can, the others find it there.

A port that was free when the job script looked may be taken when rank 0 listens. All ranks therefore know the same
candidates in the same order, and rank 0's bind decides. The others ask on each of them for this job, by a line that
only its rank 0 answers, and pass over whoever is silent or says something else. Candidates and clock bound the search.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Sequence

from launchers.errors import LaunchError

ANSWER_SECONDS = 2.0
"""A listener that has not answered by then is somebody else."""
_POLL_SECONDS = 0.1
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
                ("", port), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
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
    """Rank 0: answer until every other rank has asked. The socket goes on listening.

    Raises:
        LaunchError: ranks are missing; names them.
    """
    missing = set(range(1, world_size))
    deadline = time.monotonic() + seconds
    while missing:
        left = deadline - time.monotonic()
        if left <= 0:
            shown = ", ".join(map(str, sorted(missing)[:_SHOWN]))
            raise LaunchError(
                f"{len(missing)} of {world_size} ranks have not joined after {seconds:.0f} s: {shown}. "
                "Is the world size right, and did every node start?"
            )
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                missing.discard(_answer(connection, identity))
    listener.settimeout(None)


def find_port(address: str, candidates: Sequence[int], identity: str, rank: int, seconds: float) -> int:
    """Another rank: the candidate on which this job's rank 0 answers.

    Raises:
        LaunchError: it answers on none of them in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for port in candidates:
            if _asked(address, port, identity, rank):
                return port
        time.sleep(_POLL_SECONDS)
    raise LaunchError(
        f"rank {rank}: rank 0 of this job answers on none of the ports {list(candidates)} of {address} after "
        f"{seconds:.0f} s. Has it started (its log says why not), and can this node reach {address}?"
    )


def _answer(connection: socket.socket, identity: str) -> int:
    """The rank that asked for this job and has heard the answer; 0 for anybody else."""
    connection.settimeout(ANSWER_SECONDS)
    asked, _, rank = _line(connection).rpartition(" ")
    if asked != f"calm-scale {identity}" or not rank.isdigit():
        return 0
    connection.sendall(f"here {identity}\n".encode())
    return int(rank) if _line(connection) == "coming" else 0


def _asked(address: str, port: int, identity: str, rank: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=ANSWER_SECONDS) as connection,
    ):
        connection.sendall(f"calm-scale {identity} {rank}\n".encode())
        if _line(connection) == f"here {identity}":
            connection.sendall(b"coming\n")
            return True
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
