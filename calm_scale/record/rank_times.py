"""``ranks.jsonl``: how long a step took every rank, and which ranks are slower than those that do the same work.

A training is synchronous: every rank's step lasts as long as the slowest rank's, so step times do not tell who is slow.
The time a rank is *busy* does: its step without what it waits for the others in collectives. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from calm_scale.record.json_lines import last_object

SLOWER = 1.2
"""A rank whose busy time is this many times the median of its peers' is slow …"""
SLOWER_SECONDS = 0.005
"""… if it is also this much longer: very short steps vary by more than a fifth without a cause."""
IN_A_ROW = 3
"""So many measurements in a row make a slow rank a straggler; one may be an accident."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow in every measurement since a step.

    Attributes:
        times: its busy time over the median of its peers', in the latest measurement.
        since_step, since: the first of the measurements, and its time in seconds since the epoch.
    """

    rank: int
    node: str
    times: float
    since_step: int
    since: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.node} takes {self.times:.2f} times as long as the median of the ranks with the "
            f"same work, since step {self.since_step:,}"
        )


@dataclass(frozen=True)
class RankTimes:
    """One measured step of one rank.

    Attributes:
        peers: ranks with the same number do the same work.
        seconds: of the step, the reading of its batch included.
        waited: of these, seconds in collectives; None where it was not measured.
    """

    peers: int
    seconds: float
    waited: float | None

    @property
    def busy(self) -> float | None:
        """Seconds of the rank's own work."""
        return None if self.waited is None else max(0.0, self.seconds - self.waited)


class SlowRanks:
    """Judges one measurement after another. ``nodes``: the host of every rank."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._slow: dict[
            int, tuple[int, int, float]
        ] = {}  # rank: measurements in a row, first step, first time

    def judge(self, step: int, now: float, ranks: Sequence[RankTimes]) -> list[Straggler]:
        """The stragglers after one more measurement of all ranks, the slowest first."""
        ratios = _slow_in(ranks)
        unknown = {rank for rank, times in enumerate(ranks) if times.busy is None}
        self._slow = {rank: run for rank, run in self._slow.items() if rank in ratios or rank in unknown}
        for rank in ratios:
            count, first_step, since = self._slow.get(rank, (0, step, now))
            self._slow[rank] = (count + 1, first_step, since)
        found = [
            Straggler(rank, self._nodes[rank], round(ratio, 3), *self._slow[rank][1:])
            for rank, ratio in ratios.items()
            if self._slow[rank][0] >= IN_A_ROW
        ]
        return sorted(found, key=lambda straggler: -straggler.times)


def _slow_in(ranks: Sequence[RankTimes]) -> dict[int, float]:
    """The ranks that are slow in this measurement, with how many times the median of their peers they take."""
    busy: dict[int, list[float]] = {}
    for times in ranks:
        if times.busy is not None:
            busy.setdefault(times.peers, []).append(times.busy)
    usual = {peers: median_low(values) for peers, values in busy.items()}
    return {
        rank: times.busy / usual[times.peers]
        for rank, times in enumerate(ranks)
        if times.busy is not None
        and times.busy > SLOWER * usual[times.peers] > 0
        and times.busy - usual[times.peers] > SLOWER_SECONDS
    }


def line_of(
    step: int, attempt: int, now: float, ranks: Sequence[RankTimes], slow: Sequence[Straggler]
) -> str:
    """One measurement as a line: ``seconds`` and ``waited`` of every rank in the order of the ranks."""
    return json.dumps(
        {
            "step": step,
            "attempt": attempt,
            "time": now,
            "seconds": [_short(times.seconds) for times in ranks],
            "waited": [None if times.waited is None else _short(times.waited) for times in ranks],
            "slow": [dataclasses.asdict(straggler) for straggler in slow],
        }
    )


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def stragglers(path: Path, attempt: int) -> tuple[Straggler, ...]:
    """The stragglers in the latest measurement, if it is this attempt's."""
    latest = last_object(path)
    if latest is None or latest.get("attempt") != attempt:
        return ()
    try:
        return tuple(Straggler(**entry) for entry in latest.get("slow", ()))
    except TypeError:
        return ()
