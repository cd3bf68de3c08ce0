"""The learning rate as a pure function of the step; nothing of it has to be saved."""

from __future__ import annotations

import math

from calm_scale.config.extensions import load_extension
from calm_scale.config.training import SCHEDULE_GROUP, SCHEDULES, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (1 … ``total_steps``).

    Linear warm-up: ``lr · step / warmup_steps``. Then ``constant``; or ``cosine`` down to ``min_lr_ratio · lr`` at
    the last step; or ``wsd``: constant, and linear down to ``min_lr_ratio · lr`` over the last ``decay_steps``.
    Any other kind is a function of another package, asked for the steps after the warm-up.
    A step skipped for a non-finite gradient counts like any other.
    """
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    floor = schedule.min_lr_ratio
    if schedule.kind == "cosine":
        span = max(1, total_steps - schedule.warmup_steps)
        done = min(1.0, (step - schedule.warmup_steps) / span)
        return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    if schedule.kind == "wsd":
        left = max(0, total_steps - step)
        return config.lr * (floor + (1 - floor) * min(1.0, left / schedule.decay_steps))
    if schedule.kind in SCHEDULES:
        return config.lr
    function = load_extension(schedule.kind, SCHEDULE_GROUP, "schedule.kind")
    return float(function(config, step, total_steps))
