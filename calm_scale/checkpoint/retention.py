"""Which checkpoints stay. A pure function, so that it can be tried on every case."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from calm_scale.config.training import CheckpointConfig


def superfluous(
    steps: Mapping[int, float | None], config: CheckpointConfig, suspects: Collection[int] = ()
) -> list[int]:
    """Steps to remove, lowest first.

    Args:
        steps: every complete, verified checkpoint of this run, with its value of ``best_metric`` where it has one.
        config: keep the last n, every m-th step, and the best by a metric. What any rule keeps stays; the newest
            always does.
        suspects: steps of suspect ones. They count for no rule, and go when they are older than the last n.
    """
    ordered = sorted(steps)
    last = ordered[-max(1, config.keep_last) :]
    keep = set(last)
    if config.keep_every is not None:
        keep |= {step for step in ordered if step % config.keep_every == 0}
    if config.keep_best:
        sign = 1.0 if config.best_mode == "min" else -1.0
        scored = [
            (sign * value, -step)
            for step, value in steps.items()
            if value is not None and math.isfinite(value)
        ]
        keep |= {-negative for _, negative in sorted(scored)[: config.keep_best]}
    old = {step for step in suspects if len(last) >= config.keep_last and step < last[0]}
    return sorted(old.union(step for step in ordered if step not in keep))
