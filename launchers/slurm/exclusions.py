"""Nodes that a preflight found bad: each with the reason and the moment until which it is excluded.

The job scripts append to ``<workdir>/slurm/state/exclude``, one line per finding: node, time, reason, between tabs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from calm_scale.config.files import write_atomically

EXCLUDE_SECONDS = 24 * 3600
"""A node found bad is excluded for so long: most faults are mended, or drain the node, within a day."""


@dataclass(frozen=True)
class Exclusion:
    """``until``: seconds since 1970."""

    node: str
    until: float
    reason: str


class Exclusions:
    """The file of one run. A line without a time is from an older version, which excluded for good: it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def current(self, now: float | None = None) -> list[Exclusion]:
        """What holds at this moment, by node; of several findings about a node the latest."""
        now = time.time() if now is None else now
        found: dict[str, Exclusion] = {}
        for line in self._path.read_text().splitlines() if self._path.is_file() else []:
            node, until, reason, *_ = [*line.split("\t"), "", ""]
            if until.isdigit() and int(until) > now:
                found[node] = Exclusion(node, int(until), reason)
        return [found[node] for node in sorted(found)]

    def lift(self, nodes: list[str]) -> list[str]:
        """Take nodes out of the list; returns those that were in it."""
        current = self.current()
        lifted = [entry.node for entry in current if entry.node in nodes]
        if lifted:
            kept = [entry for entry in current if entry.node not in nodes]
            text = "".join(f"{entry.node}\t{entry.until:.0f}\t{entry.reason}\n" for entry in kept)
            write_atomically(self._path, text)
        return lifted
