"""How a model is trained: optimizer, schedule, checkpoints, loop, telemetry; the same section for both stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, model_validator

from calm_scale.config.errors import ConfigError
from calm_scale.config.section import Section


class ScheduleConfig(Section):
    """Linear warm-up from 0, then constant (the paper), cosine, or warm-up–stable–decay."""

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=2000, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _decay(self) -> ScheduleConfig:
        if self.kind == "wsd" and self.decay_steps == 0:
            raise ValueError("schedule `wsd` needs decay_steps > 0")
        return self


class OptimizerConfig(Section):
    """AdamW; no weight decay on norms and biases (every 1-D parameter)."""

    lr: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()


NODE_MTBF_HOURS = 6334.0
"""Mean time between failures of one 8-GPU node: 419 unexpected interruptions in 54 days on 2048 nodes
(the Llama 3 report): 54 · 24 · 2048 / 419 hours."""

UNESTIMATED_STEPS = 1000
"""Steps between saves under ``auto`` where no step time can be estimated (a device that is not in the table)."""


def _interval(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("steps between saves, 1 or more, or `auto`")
    return value


Interval = Annotated[int | Literal["auto"], PlainValidator(_interval)]


class CheckpointConfig(Section):
    """Cadence in optimizer steps. Retention counts complete, verified checkpoints only.

    ``interval: auto`` is Daly's optimum for ``node_mtbf_hours``, the number of nodes and the estimated times of a
    step and a save; it becomes a number when the run starts. ``keep_best`` checkpoints with the best ``best_metric``
    (a name in a metrics row: ``loss``, ``eval/loss``, …) stay besides the last ``keep_last`` and every
    ``keep_every``-th step.
    """

    interval: Interval = "auto"
    node_mtbf_hours: float = Field(default=NODE_MTBF_HOURS, gt=0)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: int = Field(default=0, ge=0)
    best_metric: str = "eval/loss"
    best_mode: Literal["min", "max"] = "min"
    async_save: bool = False
    on_disk_full: Literal["stop", "continue"] = "stop"

    @property
    def interval_steps(self) -> int:
        """Steps between saves; :data:`UNESTIMATED_STEPS` while ``auto`` is not resolved."""
        return UNESTIMATED_STEPS if self.interval == "auto" else self.interval

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: every interval, and where ``keep_every`` wants one."""
        return step % self.interval_steps == 0 or (
            self.keep_every is not None and step % self.keep_every == 0
        )


class TrainingConfig(Section):
    """Batches are counted in sequences (samples). global_batch = micro_batch × DP × accumulation.

    ``max_nonfinite_steps`` skipped in a row end the run. ``loader_workers`` threads read batches ahead (0: none).
    """

    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(default=1, gt=0)
    precision: Literal["fp32", "bf16"] = "bf16"
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval_interval: int = Field(default=1000, gt=0)
    eval_samples: int = Field(default=64, gt=0)
    on_nonfinite: Literal["skip", "stop"] = "skip"
    max_nonfinite_steps: int = Field(default=10, ge=1)
    end_of_data: Literal["repeat", "stop"] = "repeat"
    loader_workers: int = Field(default=1, ge=0, le=32)
    stall_seconds: float = Field(default=1800.0, gt=0)

    @model_validator(mode="after")
    def _divides(self) -> TrainingConfig:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}"
            )
        return self

    def accumulation(self, data_parallel: int) -> int:
        """Micro-batches per rank and step: global_batch / (micro_batch · DP).

        Raises:
            ConfigError: the three do not divide; names the nearest global batches that do.
        """
        per_pass = self.micro_batch * data_parallel
        if self.global_batch % per_pass:
            low = self.global_batch // per_pass * per_pass
            raise ConfigError(
                f"global_batch {self.global_batch} ≠ micro_batch {self.micro_batch} × data-parallel "
                f"{data_parallel} × accumulation; the nearest that fit are "
                + (f"{low} and {low + per_pass}" if low else f"{per_pass}")
            )
        return self.global_batch // per_pass


class LoggingConfig(Section):
    """``metrics.jsonl`` is always the record; wandb mirrors it and never fails a run."""

    interval: int = Field(default=10, gt=0)
    wandb: Literal["offline", "online", "disabled"] = "offline"
    wandb_project: str = "calm-scale"
    wandb_entity: str | None = None
    progress: bool = True
    pictures: bool = True
