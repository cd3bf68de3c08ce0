"""Why a launch ended: one exit code, the first rank that failed and its last words."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from calm_scale.config.errors import EXIT_REQUEUE

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
