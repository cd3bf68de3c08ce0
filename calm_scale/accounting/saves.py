"""How often a stage saves: the interval of Daly (2006) from what is known before the run, within limits.

δ seconds a save stops training, R seconds a restart takes, M the mean time between failures of the whole job
(exponential). Young (1974): τ ≈ √(2δM); Daly (2006) gives the higher-order form used here. The answer follows from the
configuration, the number of nodes and the device alone: the same on every rank, and the same after a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.model_components import autoencoder_components, lm_parameters
from calm_scale.accounting.step_time import estimated_step
from calm_scale.config.quantities import seconds_text
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import Stage
from calm_scale.config.training import NODE_MTBF_HOURS, UNESTIMATED_STEPS

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
    if stage == Stage.AUTOENCODER:
        return 12 * parameters_of(autoencoder_components(config))
    return (14 if config.require_lm().training.precision == "bf16" else 12) * lm_parameters(config)


def checkpoints_kept(config: RunConfig, stage: Stage) -> int:
    """Checkpoints on disk at the most: what retention keeps, and the one being written."""
    training = config.require_stage(stage).training
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
    training = config.require_stage(stage).training
    step = step_seconds or estimated_step(config, stage, ranks, nodes, chip)
    size = float(checkpoint_bytes(config, stage))
    save = SAVE_OVERHEAD_SECONDS + size / min(STORAGE_PER_NODE * nodes, STORAGE_TOTAL)
    mtbf = job_mtbf(nodes, training.checkpoint.node_mtbf_hours)
    optimal = optimal_interval(save, mtbf)
    steps, limit = _within_limits(optimal, step, training.steps)
    found = SaveInterval(size, step, save, mtbf, optimal, steps, limit, 0.0)
    return replace(found, goodput=expected_goodput(found.interval_seconds, save, RESTART_SECONDS, mtbf))


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
    checkpoint = config.require_stage(stage).training.checkpoint
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
    section = config.require_stage(stage)
    checkpoint = section.training.checkpoint
    if checkpoint.interval != "auto":
        return config
    steps = UNESTIMATED_STEPS
    if chip is not None:
        steps = save_interval(config, stage, ranks=ranks, nodes=nodes, chip=chip).steps
    resolved = checkpoint.model_copy(update={"interval": steps})
    training = section.training.model_copy(update={"checkpoint": resolved})
    return config.model_copy(update={stage: section.model_copy(update={"training": training})})


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


def job_mtbf(num_nodes: int, node_mtbf_hours: float = NODE_MTBF_HOURS) -> float:
    """Seconds between failures of a job on ``num_nodes`` nodes."""
    return node_mtbf_hours * 3600 / num_nodes


def optimal_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between saves: √(2δM)·[1 + ⅓√(δ/2M) + ⅑·δ/2M] − δ for δ < 2M, else M (Daly)."""
    ratio = save_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    root = math.sqrt(2 * save_seconds * mtbf_seconds)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_goodput(
    interval: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Share of wall-clock time that becomes progress: τ / (M·e^{R/M}·(e^{(τ+δ)/M} − 1)).

    Failures strike at any time, also while saving and restarting; everything since the last save is lost.
    """
    m = mtbf_seconds
    exponent = (interval + save_seconds) / m
    if exponent + restart_seconds / m > 700:
        return 0.0
    return interval / (m * math.exp(restart_seconds / m) * math.expm1(exponent))
