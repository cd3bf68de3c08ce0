"""When checkpoints are written and which ones are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from calm_scale.config.base import Section

NODE_MTBF_HOURS = 6334.0
"""Mean time between failures of one 8-GPU node: 419 unexpected interruptions in 54 days on 2048 nodes
(the Llama 3 report): 54 · 24 · 2048 / 419 hours."""

UNESTIMATED_STEPS = 1000
"""Steps between saves under ``auto`` where no step time can be estimated (a device that is not in the table)."""


def _interval(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("steps between saves, 1 or more, or `auto`")
    return value


Interval = Annotated[int | Literal["auto"], PlainValidator(_interval)]


class CheckpointConfig(Section):
    """Cadence in optimizer steps. Retention counts complete, verified checkpoints only.

    ``interval: auto`` is Daly's optimum for ``node_mtbf_hours``, the number of nodes and the estimated times of a
    step and a save; it becomes a number when the run starts. ``keep_best`` checkpoints with the best ``best_metric``
    (a name in a metrics row: ``loss``, ``eval/loss``, …) stay besides the last ``keep_last`` and every
    ``keep_every``-th step.
    """

    interval: Interval = "auto"
    node_mtbf_hours: float = Field(default=NODE_MTBF_HOURS, gt=0)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: int = Field(default=0, ge=0)
    best_metric: str = "eval/loss"
    best_mode: Literal["min", "max"] = "min"
    async_save: bool = False
    on_disk_full: Literal["stop", "continue"] = "stop"

    @property
    def interval_steps(self) -> int:
        """Steps between saves; :data:`UNESTIMATED_STEPS` while ``auto`` is not resolved."""
        return UNESTIMATED_STEPS if self.interval == "auto" else self.interval

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: every interval, and where ``keep_every`` wants one."""
        return step % self.interval_steps == 0 or (
            self.keep_every is not None and step % self.keep_every == 0
        )
