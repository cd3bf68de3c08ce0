"""How a model is trained: optimizer, schedule, checkpoints, loop, telemetry; the same section for both stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from calm_scale.config.errors import ConfigError
from calm_scale.config.extensions import load_extension
from calm_scale.config.section import RESULTS, SAFE, Section

NODE_MTBF_HOURS = 6334.0
"""Mean time between failures of one 8-GPU node: 419 unexpected interruptions in 54 days on 2048 nodes
(the Llama 3 report): 54 · 24 · 2048 / 419 hours."""

UNESTIMATED_STEPS = 1000
"""Steps between saves under ``auto`` where no step time can be estimated (a device that is not in the table)."""


SCHEDULES = ("constant", "cosine", "wsd")


def _schedule(kind: str) -> str:
    """A built-in schedule, or a function (optimizer, step, total steps) → learning rate of another package."""
    if kind in SCHEDULES:
        return kind
    try:
        found = load_extension(kind, SCHEDULE_GROUP, "schedule.kind")
    except ConfigError as error:
        raise ValueError(
            f"should be 'constant', 'cosine' or 'wsd', or package.module:function; {error}"
        ) from None
    if not callable(found):
        raise ValueError(f"{kind} is not a function")
    return kind


SCHEDULE_GROUP = "calm_scale.schedules"
"""Where installed packages register schedules."""


class ScheduleConfig(Section):
    """The learning rate over the steps: linear warm-up from 0, then what ``kind`` says."""

    field_policy = RESULTS

    kind: Annotated[str, AfterValidator(_schedule)] = "constant"
    """After the warm-up: `constant` (the paper), `cosine` to the end, `wsd` (linear at the end), or a function"""
    warmup_steps: int = Field(default=2000, ge=0)
    """Optimizer steps over which the rate rises from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the end over which `wsd` decays; other kinds do not use it."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Rate at the last step as a share of `lr`, for `cosine` and `wsd`."""

    @model_validator(mode="after")
    def _decay(self) -> ScheduleConfig:
        if self.kind == "wsd" and self.decay_steps == 0:
            raise ValueError("schedule `wsd` needs decay_steps > 0")
        return self


class OptimizerConfig(Section):
    """AdamW; no weight decay on norms and biases (every 1-D parameter)."""

    field_policy = RESULTS

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after the warm-up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of an update."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, multiplied by the rate."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradients; 0 does not clip."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the steps."""


def _interval(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("steps between saves, 1 or more, or `auto`")
    return value


Interval = Annotated[int | Literal["auto"], PlainValidator(_interval)]


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept. Retention counts complete, verified checkpoints only."""

    field_policy = SAFE

    interval: Interval = "auto"
    """Optimizer steps between saves; `auto` is Daly's optimum for the nodes, their failures, a step and a save."""
    node_mtbf_hours: float = Field(default=NODE_MTBF_HOURS, gt=0)
    """Mean time between failures of one node in hours, for `interval: auto`."""
    keep_last: int = Field(default=3, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = Field(default=None, gt=0)
    """Every so many steps a checkpoint is written and kept for good; null keeps none for good."""
    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the best `best_metric` that are kept besides."""
    best_metric: str = "eval/loss"
    """A name in a row of metrics.jsonl, such as `loss` or `eval/loss`."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest `best_metric` is best."""
    async_save: bool | None = None
    """Write checkpoints in the background while training continues; null does so on GPUs."""
    on_disk_full: Literal["stop", "continue"] = "stop"
    """After a save that failed because the disk is full: stop, or train on and try again at the next save."""

    @property
    def interval_steps(self) -> int:
        """Steps between saves; :data:`UNESTIMATED_STEPS` while ``auto`` is not resolved."""
        return UNESTIMATED_STEPS if self.interval == "auto" else self.interval

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: every interval, and where ``keep_every`` wants one."""
        return step % self.interval_steps == 0 or (
            self.keep_every is not None and step % self.keep_every == 0
        )


class ProfileConfig(Section):
    """Steps that torch's profiler records, on some ranks: a Chrome trace each in the stage's folder `profile`."""

    field_policy = SAFE

    first_step: int | None = Field(default=None, gt=0)
    """The first recorded step; null is the fourth step of each attempt, after what only the first ones do."""
    steps: int = Field(default=3, gt=0)
    """Number of steps that are recorded."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    """Ranks that record."""


class TrainingConfig(Section):
    """Batches are counted in sequences (samples): global_batch = micro_batch × data-parallel ranks × accumulation."""

    steps: Annotated[int, RESULTS] = Field(gt=0)
    """Optimizer steps of the whole run; under `schedule.kind: constant` safe to raise at resume."""
    global_batch: Annotated[int, RESULTS] = Field(gt=0)
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: Annotated[int, SAFE] = Field(default=1, gt=0)
    """Sequences of one forward pass of one rank."""
    precision: Annotated[Literal["fp32", "bf16"], RESULTS] = "bf16"
    """Number format of the forward and backward pass; the optimizer keeps fp32 weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which are kept."""
    eval_interval: Annotated[int, SAFE] = Field(default=1000, gt=0)
    """Optimizer steps between evaluations on the held-out split."""
    eval_samples: Annotated[int, SAFE] = Field(default=64, gt=0)
    """Sequences of one evaluation."""
    on_nonfinite: Annotated[Literal["skip", "stop"], SAFE] = "skip"
    """At a loss or gradient that is not finite: skip the step, or stop."""
    max_nonfinite_steps: Annotated[int, SAFE] = Field(default=10, ge=1)
    """Number of steps skipped in a row that ends the run."""
    end_of_data: Annotated[Literal["repeat", "stop"], RESULTS] = "repeat"
    """Once every sample was used: begin another epoch in another order, or stop."""
    loader_workers: Annotated[int, SAFE] = Field(default=1, ge=0, le=32)
    """Threads that read batches ahead; 0 reads in the training thread."""
    gc_interval: Annotated[int, SAFE] = Field(default=50, ge=0)
    """Optimizer steps between runs of Python's garbage collector, at once on all ranks; 0: whenever Python likes."""
    profile: Annotated[ProfileConfig | None, SAFE] = None
    """Steps that are profiled; null: none."""
    stall_seconds: Annotated[float, SAFE] = Field(default=1800.0, gt=0)
    """Seconds without progress after which the watchdog ends the process."""

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
    """Telemetry: ``metrics.jsonl`` is always the record; wandb mirrors it and never fails a run."""

    field_policy = SAFE

    interval: int = Field(default=10, gt=0)
    """Optimizer steps between lines on the console; metrics.jsonl has every step."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Whether wandb keeps its files in the run folder, sends them, or is not used."""
    wandb_project: str = "calm-scale"
    """The project in wandb."""
    wandb_entity: str | None = None
    """The user or team in wandb; null is the account's default."""
    progress: bool = True
    """Show a progress bar on a terminal."""
    pictures: bool = True
    """Draw the curves of a training when it ends."""
