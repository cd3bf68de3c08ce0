"""Rendezvous ports: derived from the job, below the range the kernel hands out, with a bounded retry."""

from __future__ import annotations

import random
import socket
import zlib
from collections.abc import Iterable
from pathlib import Path

from launchers.errors import LaunchError

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


def candidates(identity: str, count: int = NUM_CANDIDATES) -> list[int]:
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
