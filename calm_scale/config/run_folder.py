"""The stages of a run and the paths of its folder; a stored document, read as that of the folder it lies in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from calm_scale.config.section import expand_user

CONFIG_FILE = "config.yaml"
"""The resolved configuration of a run's latest attempt, in its folder."""


class Stage(StrEnum):
    """A stage of a run, in the order of the chain. Its value names its job, and its section and folder if it trains."""

    PREP = "prep"
    AUTOENCODER = "autoencoder"
    LM = "lm"
    EVAL = "eval"


TRAINED = (Stage.AUTOENCODER, Stage.LM)
"""The stages that train a model: they have a section with ``training`` and a :class:`StageFolder`."""


@dataclass(frozen=True)
class StageFolder:
    """The folder of one training stage, ``<workdir>/autoencoder`` or ``<workdir>/lm``."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Step folders, ``step_XXXXXXXX``."""
        return self.path / "checkpoints"

    @property
    def ledger(self) -> Path:
        """What every attempt did when, one event a line."""
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        """One row of numbers a step."""
        return self.path / "metrics.jsonl"

    @property
    def failures(self) -> Path:
        """Ranks that failed, one a line."""
        return self.path / "failures.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the training that writes here."""
        return self.path / ".lock"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, its ``workdir``."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration of the latest attempt."""
        return self.path / CONFIG_FILE

    @property
    def data(self) -> Path:
        """Prepared splits, where ``data`` of the run names no other folder."""
        return self.path / "data"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, where ``tokenizer.path`` of the run names no other."""
        return self.path / "tokenizer.json"

    @property
    def export(self) -> Path:
        """The frozen autoencoder, where ``lm.autoencoder`` of the run names no other."""
        return self.path / "autoencoder" / "export"

    @property
    def evaluations(self) -> Path:
        """BrierLM results, one file a checkpoint."""
        return self.path / "eval"

    @property
    def slurm(self) -> Path:
        """Job scripts, their logs, and the record of what was submitted."""
        return self.path / "slurm"

    @property
    def sweep(self) -> Path:
        """The runs of a sweep, a folder each."""
        return self.path / "sweep"

    def stage(self, stage: Stage) -> StageFolder:
        """The folder of a training stage."""
        return StageFolder(self.path / stage)


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
