"""When checkpoints are written and which ones are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calm_scale.config.base import Section


class CheckpointConfig(Section):
    """Cadence in optimizer steps. Retention counts complete, verified checkpoints only."""

    interval: int = Field(default=1000, gt=0)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, gt=0)
    async_save: bool = False
    on_disk_full: Literal["stop", "continue"] = "stop"
