"""The stages of a run, and the paths of its folder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
    def ranks(self) -> Path:
        """The times of every rank in a step of each logging interval, and the stragglers, one measurement a line."""
        return self.path / "ranks.jsonl"

    @property
    def profile(self) -> Path:
        """Traces of torch's profiler."""
        return self.path / "profile"

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
