"""Telemetry: the local record, progress bars and wandb."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calm_scale.config.base import Section


class LoggingConfig(Section):
    """``metrics.jsonl`` is always the record; wandb mirrors it and never fails a run."""

    interval: int = Field(default=10, gt=0)
    wandb: Literal["offline", "online", "disabled"] = "offline"
    wandb_project: str = "calm-scale"
    wandb_entity: str | None = None
    progress: bool = True
    pictures: bool = True
