"""A run's stored document, read as that of the folder it lies in: the folder that is named decides, wherever the run
was started from and wherever it has been moved to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calm_scale.config.section import expand_user

CONFIG_FILE = "config.yaml"
"""The resolved configuration of a run's latest attempt, in its folder."""

_ROOMS = ("data", "autoencoder", "lm", "eval", "slurm")
_ALWAYS_WRITTEN = frozenset(
    ("name", "workdir", "seed", "vocab_size", "patch_size", "tokenizer", "data", "prep", "autoencoder", "lm")
)
"""Keys of every resolved document; a person leaves some of them out or has an ``extends``."""


def is_stored(file: Path, values: Mapping[str, Any]) -> bool:
    """Whether ``file``, which holds ``values``, is what a run stored in its folder, and not a document of a user's."""
    return (
        file.name == CONFIG_FILE
        and values.keys() >= _ALWAYS_WRITTEN
        and "extends" not in values
        and any((file.parent / room).is_dir() for room in _ROOMS)
    )


def placed_in(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved ``document`` of the run that lies in ``folder`` now.

    Paths below the folder it was in are taken below ``folder``. Other relative ones are relative to where the run was
    started; where ``folder`` ends with the stored relative ``workdir``, that is known, else they stay as they are.
    """
    if "workdir" not in document:
        return {**document, "workdir": str(folder)}
    stored = Path(expand_user(str(document["workdir"])))
    if stored.resolve() == folder.resolve():
        return dict(document)
    start = _started_in(stored, folder.resolve())

    def place(text: object) -> object:
        if text is None:
            return None
        path = Path(expand_user(str(text)))
        if path.is_relative_to(stored):
            return str(folder / path.relative_to(stored))
        return str(path if start is None else start / path)

    placed = {**document, "workdir": str(folder), "data": place(document.get("data"))}
    for section, key in (("tokenizer", "path"), ("lm", "autoencoder")):
        values = document.get(section)
        if isinstance(values, dict) and values.get(key) is not None:
            placed[section] = {**values, key: place(values[key])}
    return placed


def _started_in(stored: Path, folder: Path) -> Path | None:
    """The folder below which ``stored`` names ``folder``."""
    length = len(stored.parts)
    if stored.is_absolute() or (length and folder.parts[-length:] != stored.parts):
        return None
    return Path(*folder.parts[: len(folder.parts) - length])
