"""AdamW and its learning-rate schedule, shared by both stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from calm_scale.config.base import Section


class ScheduleConfig(Section):
    """Linear warm-up from 0, then constant (the paper), cosine, or warm-up–stable–decay."""

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=2000, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _decay(self) -> ScheduleConfig:
        if self.kind == "wsd" and self.decay_steps == 0:
            raise ValueError("schedule `wsd` needs decay_steps > 0")
        return self


class OptimizerConfig(Section):
    """AdamW; no weight decay on norms and biases (every 1-D parameter)."""

    lr: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
