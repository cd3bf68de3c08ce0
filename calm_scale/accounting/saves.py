"""How often a stage saves: Daly's interval from what is known before the run, within limits.

The answer follows from the configuration, the number of nodes and the device alone: the same on every rank, and
again the same when the run resumes there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from calm_scale.accounting import intervals, timing
from calm_scale.accounting.autoencoder_model import autoencoder_components
from calm_scale.accounting.backbone_model import lm_of
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.model import lm_parameters
from calm_scale.accounting.report.document import seconds_text
from calm_scale.config.errors import ConfigError
from calm_scale.config.run import RunConfig
from calm_scale.config.training import UNESTIMATED_STEPS, TrainingConfig

Stage = Literal["autoencoder", "lm"]

STORAGE_PER_NODE = 2e9
"""Bytes/s one node writes to shared storage: an assumption."""

STORAGE_TOTAL = 100e9
"""Bytes/s the shared storage takes from all nodes together: another one."""

SAVE_OVERHEAD_SECONDS = 5.0
"""Collecting, hashing, fsync and rename, whatever the size: another one."""

RESTART_SECONDS = 300.0
"""From a failure to the first new step: another one."""

MIN_SECONDS = 60.0
MAX_SECONDS = 4 * 3600.0
LEAST_SAVES = 10
"""A run leaves at least that many checkpoints, to score and to go back to."""


@dataclass(frozen=True)
class SaveInterval:
    """How often to save, by Daly's formula, and what that leaves of the time.

    Attributes:
        steps: optimizer steps between saves, within the limits.
        interval_seconds: the same in seconds.
        optimal_seconds: what the formula says.
        limit: which limit moved it; empty where the formula stands.
        goodput: expected share of the time that becomes progress.
    """

    checkpoint_bytes: float
    step_seconds: float
    save_seconds: float
    mtbf_seconds: float
    optimal_seconds: float
    steps: int
    limit: str
    goodput: float

    @property
    def interval_seconds(self) -> float:
        """Seconds of training between saves."""
        return self.steps * self.step_seconds

    @property
    def reason(self) -> str:
        """Why this number, in words."""
        text = (
            f"Daly's {seconds_text(self.optimal_seconds)} for a failure every {seconds_text(self.mtbf_seconds)}, "
            f"{seconds_text(self.save_seconds)} a save, {seconds_text(self.step_seconds)} a step"
        )
        return text + (f"; {self.limit}" if self.limit else "")


def checkpoint_bytes(config: RunConfig, stage: Stage) -> int:
    """Bytes of one checkpoint: fp32 weights and two moments a parameter (the LM: beside its bf16 weights)."""
    if stage == "autoencoder":
        return 12 * parameters_of(autoencoder_components(config))
    return (14 if lm_of(config).training.precision == "bf16" else 12) * lm_parameters(config)


def checkpoints_kept(config: RunConfig, stage: Stage) -> int:
    """Checkpoints on disk at the most: what retention keeps, and the one being written."""
    training = training_of(config, stage)
    keeping = training.checkpoint
    forever = training.steps // keeping.keep_every if keeping.keep_every is not None else 0
    return keeping.keep_last + keeping.keep_best + forever + 1


def kept_text(config: RunConfig, stage: Stage) -> str:
    """Where :func:`checkpoints_kept` comes from: `3 kept + 1 being written`."""
    return f"{checkpoints_kept(config, stage) - 1} kept + 1 being written"


def save_interval(
    config: RunConfig,
    stage: Stage,
    *,
    ranks: int,
    nodes: int,
    chip: Device,
    step_seconds: float | None = None,
) -> SaveInterval:
    """The interval for a stage on that many ranks and nodes.

    Args:
        step_seconds: of one optimizer step where the caller has an estimate.
    """
    training = training_of(config, stage)
    step = step_seconds or estimated_step(config, stage, ranks, nodes, chip)
    size = float(checkpoint_bytes(config, stage))
    save = SAVE_OVERHEAD_SECONDS + size / min(STORAGE_PER_NODE * nodes, STORAGE_TOTAL)
    mtbf = intervals.job_mtbf(nodes, training.checkpoint.node_mtbf_hours)
    optimal = intervals.optimal_interval(save, mtbf)
    steps, limit = _within_limits(optimal, step, training.steps)
    found = SaveInterval(size, step, save, mtbf, optimal, steps, limit, 0.0)
    return replace(
        found, goodput=intervals.expected_goodput(found.interval_seconds, save, RESTART_SECONDS, mtbf)
    )


def interval_text(
    config: RunConfig,
    stage: Stage,
    *,
    ranks: int,
    nodes: int,
    chip: Device | None,
    unknown: str = "no step time can be estimated for this device",
) -> str:
    """The number of steps between saves that a run uses, and why (``unknown``: why not, without a ``chip``)."""
    checkpoint = training_of(config, stage).checkpoint
    if checkpoint.interval != "auto":
        return f"every {checkpoint.interval:,} steps (set by {stage}.training.checkpoint.interval)"
    if chip is None:
        return f"every {UNESTIMATED_STEPS:,} steps (auto: {unknown})"
    found = save_interval(config, stage, ranks=ranks, nodes=nodes, chip=chip)
    return f"every {found.steps:,} steps, {seconds_text(found.interval_seconds)} (auto: {found.reason})"


def with_interval(
    config: RunConfig, stage: Stage, *, ranks: int, nodes: int, chip: Device | None
) -> RunConfig:
    """The run with ``checkpoint.interval: auto`` of a stage replaced by its number."""
    section = getattr(config, stage)
    checkpoint = training_of(config, stage).checkpoint
    if checkpoint.interval != "auto":
        return config
    steps = UNESTIMATED_STEPS
    if chip is not None:
        steps = save_interval(config, stage, ranks=ranks, nodes=nodes, chip=chip).steps
    resolved = checkpoint.model_copy(update={"interval": steps})
    training = section.training.model_copy(update={"checkpoint": resolved})
    return config.model_copy(update={stage: section.model_copy(update={"training": training})})


def training_of(config: RunConfig, stage: Stage) -> TrainingConfig:
    """The training section of a stage."""
    section = config.autoencoder if stage == "autoencoder" else config.lm
    if section is None:
        raise ConfigError(f"run {config.name}: there is no `{stage}` section")
    return section.training


def estimated_step(config: RunConfig, stage: Stage, ranks: int, nodes: int, chip: Device) -> float:
    """Seconds of one optimizer step of a stage on that many ranks and nodes."""
    if stage == "lm":
        data_parallel = max(1, ranks // lm_of(config).parallel.model_parallel)
        return timing.step_time(config, data_parallel, chip, max(1, ranks // nodes)).total
    return timing.autoencoder_step_seconds(config, ranks, chip, max(1, ranks // nodes))


def _within_limits(seconds: float, step_seconds: float, total_steps: int) -> tuple[int, str]:
    """Steps between saves, and which limit moved them."""
    limit = ""
    if seconds < MIN_SECONDS:
        seconds, limit = MIN_SECONDS, f"not under {seconds_text(MIN_SECONDS)}"
    elif seconds > MAX_SECONDS:
        seconds, limit = MAX_SECONDS, f"not over {seconds_text(MAX_SECONDS)}"
    steps = max(1, round(seconds / step_seconds))
    most = max(1, total_steps // LEAST_SAVES)
    return (most, f"at least {LEAST_SAVES} saves a run") if steps > most else (steps, limit)
