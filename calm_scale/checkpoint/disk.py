"""Is there room for the next save?"""

from __future__ import annotations

import shutil
from pathlib import Path

from calm_scale.checkpoint.errors import DiskFullError

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
