"""The times of every rank in one step of each logging interval, and the warning of ranks that stay slow."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from calm_scale.config.run_folder import StageFolder
from calm_scale.record.json_lines import LineWriter
from calm_scale.record.rank_times import RankTimes, SlowRanks, line_of
from calm_scale.runtime.wait_clock import WaitClock
from calm_scale.runtime.world import World
from calm_scale.training.attempt import Training

MOST_NAME_BYTES = 64
"""Of a host's name."""


class RankClock:
    """Measures the steps that are multiples of the logging interval. Every rank makes every call, in the same order.

    Between these steps it costs nothing; such a step ends with one small message from each rank to the first. A world
    of one rank is not measured.
    """

    def __init__(self, training: Training) -> None:
        self._world, self._store, self._telemetry = training.world, training.store, training.telemetry
        self._interval, self._attempt = training.telemetry.interval, training.attempt.number
        self._peers = training.engine.pipeline_rank
        self._waited: float | None = None
        self._judge: SlowRanks | None = None
        self._known: set[int] = set()
        self._lines = LineWriter(StageFolder(training.attempt.folder).ranks, training.telemetry.warn)

    def is_due(self, step: int) -> bool:
        """Whether this step is measured."""
        return self._world.world_size > 1 and step % self._interval == 0

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """The block is the engine's work of the step. While a save runs beside it its waits are not known."""
        self._waited = None
        if not self.is_due(step) or self._store.saving is not None or not dist.is_initialized():
            yield
            return
        clock = WaitClock(self._world.device)
        with clock.running():
            yield
        self._waited = clock.seconds()

    def gather(self, step: int, seconds: float) -> None:
        """Brings the times of a measured step to the first rank, which records and judges them.

        Args:
            seconds: of the step, with the reading of its batch.
        """
        if self._judge is None:
            self._judge = SlowRanks(_nodes(self._world))
        waited = math.nan if self._waited is None else self._waited
        rows = self._world.gather_numbers([self._peers, seconds, waited])
        if not rows:
            return
        ranks = [
            RankTimes(int(peers), spent, None if math.isnan(wait) else wait) for peers, spent, wait in rows
        ]
        now = time.time()
        slow = self._judge.judge(step, now, ranks)
        self._lines.add(line_of(step, self._attempt, now, ranks, slow))
        for straggler in slow:
            if straggler.rank not in self._known:
                self._telemetry.warn(str(straggler))
        self._known = {straggler.rank for straggler in slow}

    def close(self) -> None:
        """A last try for the lines that could not be written."""
        self._lines.close()


def _nodes(world: World) -> list[str]:
    """The host of every rank, on the first rank; empty elsewhere. As numbers, it is one small message a rank too."""
    mine = socket.gethostname().encode()[:MOST_NAME_BYTES].ljust(MOST_NAME_BYTES)
    return [bytes(map(int, row)).decode(errors="replace").strip() for row in world.gather_numbers(mine)]
