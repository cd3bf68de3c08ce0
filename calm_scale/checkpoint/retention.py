"""Which checkpoints are kept, and whether the next one has room."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from calm_scale.checkpoint.errors import DiskFullError
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


MARGIN = 1.02
"""Names, manifest and file-system blocks on top of the shards."""


def check_space(root: Path, needed: int | None, step: int) -> None:
    """Raises DiskFullError when ``needed`` bytes (estimated; None: unknown) do not fit."""
    if needed is None:
        return
    free = shutil.disk_usage(root).free
    if free < needed * MARGIN:
        raise DiskFullError(
            f"step {step} not saved: no space left. It needs about {human_bytes(int(needed * MARGIN))}, "
            f"{root} has {human_bytes(free)} free. Older checkpoints are untouched. Make room, or lower "
            "training.checkpoint.keep_last"
        )


def human_bytes(count: int) -> str:
    """``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
