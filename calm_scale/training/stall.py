"""When a step counts as stalled, by the steps so far; and what the collectives were doing, for whoever looks why."""

from __future__ import annotations

from pathlib import Path

STEPS_MEASURED = 20
"""Steps of an attempt before its own times count: the first ones compile kernels and fill buffers."""
TIMES_THE_SLOWEST = 20.0
SHORTEST_SECONDS = 300.0
"""Another rank may wait for a file as long."""


class StepLimit:
    """The time limit of the next step: twenty times the slowest of this attempt, and at least five minutes."""

    def __init__(self) -> None:
        self._count, self._slowest = 0, 0.0

    @property
    def seconds(self) -> float | None:
        """None until enough steps were measured."""
        if self._count < STEPS_MEASURED:
            return None
        return max(SHORTEST_SECONDS, TIMES_THE_SLOWEST * self._slowest)

    def add(self, seconds: float) -> None:
        """One step has taken so long."""
        self._count, self._slowest = self._count + 1, max(self._slowest, seconds)


def dump_collectives(folder: Path, attempt: int, rank: int) -> Path:
    """Writes torch's flight recorder, the latest collectives of this rank with their states, as JSON.

    Returns ``<folder>/collectives/attempt_A.rank_R.json``. It has no entries where TORCH_FR_BUFFER_SIZE is 0.
    """
    import torch

    path = folder / "collectives" / f"attempt_{attempt}.rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(torch._C._distributed_c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]
    return path
