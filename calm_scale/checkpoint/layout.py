"""Names inside a checkpoints folder.

::

    checkpoints/
      latest                   name of the newest step folder; a convenience, never the proof
      step_00000100/           complete by construction: it got this name only after it was verified
        card.json              what this is a checkpoint of
        manifest.json          every file with size and checksum
        shards/                what the engine wrote
        suspect.json           only where no finite step followed: why it is not resumed unasked
      step_00000200.tmp/       a save that has not been committed
      step_00000050.deleting/  a folder that retention is removing
      step_00000150.damaged-…  a folder that did not verify, moved aside by a new save of its step (a complete one
                               becomes ``.replaced-…``)
"""

from __future__ import annotations

import re
from pathlib import Path

from calm_scale.config.run_folder import StageFolder

CARD = "card.json"
MANIFEST = "manifest.json"
SUSPECT = "suspect.json"
SHARDS = "shards"
LATEST = "latest"
TMP = ".tmp"
DELETING = ".deleting"

_STEP = re.compile(r"step_(\d{8,})")


def folder_name(step: int) -> str:
    """``step_00000100``. The number, not the text, is what gets compared."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a committed folder's name; None for everything else."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Folders with a committed name, lowest step first."""
    found = [(step_of(path.name), path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted((step, path) for step, path in found if step is not None)


def unfinished(root: Path) -> list[Path]:
    """``step_*.tmp`` folders: saves that never got committed."""
    return sorted(path for path in root.glob(f"step_*{TMP}") if path.is_dir()) if root.is_dir() else []


def checkpoints_folder(path: Path) -> Path:
    """The checkpoints folder for a stage's folder or for itself."""
    inner = StageFolder(path).checkpoints
    return inner if inner.is_dir() else path
