"""When checkpoints are written and which ones are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calm_scale.config.base import Section


class CheckpointConfig(Section):
    """Cadence in optimizer steps. Retention counts complete, verified checkpoints only.

    ``keep_best`` checkpoints with the best ``best_metric`` (a name in a metrics row: ``loss``, ``eval/loss``, …)
    stay besides the last ``keep_last`` and every ``keep_every``-th step.
    """

    interval: int = Field(default=1000, gt=0)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: int = Field(default=0, ge=0)
    best_metric: str = "eval/loss"
    best_mode: Literal["min", "max"] = "min"
    async_save: bool = False
    on_disk_full: Literal["stop", "continue"] = "stop"
