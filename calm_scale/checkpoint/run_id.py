"""Which run a stage's folder belongs to: an id that survives requeues, node failures and new job numbers."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from calm_scale.checkpoint.errors import CheckpointError
from calm_scale.checkpoint.file_list import write_json
from calm_scale.checkpoint.judge import RUN_FILE, known_run
from calm_scale.config.run_folder import StageFolder


def run_id(folder: Path, name: str) -> str:
    """The id in ``<stage folder>/run.json``; made on the first start, and found again from the checkpoints if lost.

    Call it on one rank. Raises CheckpointError when the file is there but cannot be read.
    """
    path = folder / RUN_FILE
    if path.exists():
        try:
            return str(json.loads(path.read_bytes())["run_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f'{path} is damaged ({error}); it holds {{"run_id": …}} of the cards'
            ) from None
    folder.mkdir(parents=True, exist_ok=True)
    found = known_run(StageFolder(folder).checkpoints) or f"{name}-{secrets.token_hex(4)}"
    write_json(path, {"run_id": found})
    return found
