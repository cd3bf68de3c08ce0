"""What a document may say but hardly means; `config validate`, dry runs, `submit` and the trainings state it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from calm_scale.config.optimizer import OptimizerConfig
from calm_scale.config.run import RunConfig
from calm_scale.config.training import TrainingConfig

Trained = Literal["autoencoder", "lm"]
TRAINED: tuple[Trained, ...] = ("autoencoder", "lm")


def notes(config: RunConfig, stage: Trained | None = None) -> list[str]:
    """One line for each such setting of a training stage (None: of both): its key, what it does, what to set."""
    return [line for one in TRAINED if stage in (None, one) for line in _stage_notes(config, one)]


def tokens_per_step(config: RunConfig, stage: Trained) -> int | None:
    """Tokens of one optimizer step; None where the run has no such stage."""
    if stage == "autoencoder":
        patches = config.autoencoder.patches if config.autoencoder is not None else None
    else:
        patches = config.lm.backbone.positions if config.lm is not None else None
    return None if patches is None else patches * config.patch_size * _batch(config, stage)


def step_notes(before: RunConfig, after: RunConfig) -> list[str]:
    """One line for each stage whose steps have another number of tokens in ``after`` for another reason than its
    ``global_batch``."""
    lines = []
    for stage in TRAINED:
        old, new = tokens_per_step(before, stage), tokens_per_step(after, stage)
        old_batch, new_batch = _batch(before, stage), _batch(after, stage)
        if old and new and old != new and old_batch == new_batch:
            lines.append(
                f"{stage}.training.global_batch counts sequences: a step has {new:,} tokens instead of {old:,}"
                + (f"; {new_batch * old // new} keeps {old:,}" if (new_batch * old) % new == 0 else "")
            )
    return lines


def _batch(config: RunConfig, stage: Trained) -> int:
    section = config.autoencoder if stage == "autoencoder" else config.lm
    return section.training.global_batch if section is not None else 0


def _stage_notes(config: RunConfig, stage: Trained) -> Iterator[str]:
    section = config.autoencoder if stage == "autoencoder" else config.lm
    if section is None:
        return
    for line in _schedule_notes(section.training):
        yield f"{stage}.training.optimizer.schedule.{line}"
    if (
        stage == "lm"
        and config.lm is not None
        and config.lm.head.kind == "energy"
        and config.lm.head.alpha == 2
    ):
        yield (
            "lm.head.alpha: at 2 the energy score is not strictly proper: it trains the mean of the samples and "
            "nothing else; below 2 it trains their whole law"
        )


def _schedule_notes(training: TrainingConfig) -> Iterator[str]:
    schedule, steps = training.optimizer.schedule, training.steps
    if schedule.warmup_steps >= steps:
        yield (
            f"warmup_steps: the rate warms up over {schedule.warmup_steps:,} steps, but the run has {steps:,}: it "
            f"never reaches {training.optimizer.lr}"
        )
    if schedule.kind == "wsd" and schedule.warmup_steps + schedule.decay_steps > steps:
        yield _overlap(training.optimizer, steps)
    if schedule.kind != "wsd" and schedule.decay_steps:
        yield f"decay_steps: {schedule.decay_steps:,} is not used, kind {schedule.kind} has no such phase (wsd has)"
    if schedule.kind == "constant" and schedule.min_lr_ratio:
        yield f"min_lr_ratio: {schedule.min_lr_ratio} is not used, kind constant does not decay"
    if schedule.kind != "constant" and schedule.min_lr_ratio == 1:
        yield f"min_lr_ratio: at 1 kind {schedule.kind} does not decay"


def _overlap(optimizer: OptimizerConfig, steps: int) -> str:
    schedule = optimizer.schedule
    most = steps - schedule.warmup_steps
    advice = f"set it to at most {most:,}" if most > 0 else "shorten both"
    return (
        f"decay_steps: warm-up ({schedule.warmup_steps:,} steps) and decay ({schedule.decay_steps:,}) are longer than "
        f"the run ({steps:,}): the rate falls at the end of the warm-up instead of staying at {optimizer.lr}; {advice}"
    )
