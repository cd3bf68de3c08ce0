"""How long a training stage takes on a device: its steps times the one estimate of a step that plans use, too."""

from __future__ import annotations

from dataclasses import dataclass

from calm_scale.accounting import saves
from calm_scale.accounting.costs import autoencoder_step_flops, step_flops
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.report.document import seconds_text
from calm_scale.config.run import RunConfig


@dataclass(frozen=True)
class Duration:
    """A whole stage: ``steps`` of ``step_seconds`` on ``ranks`` devices at that share of their peak (``mfu``)."""

    steps: int
    step_seconds: float
    ranks: int
    mfu: float

    @property
    def hours(self) -> float:
        """Of training alone, without saves and restarts."""
        return self.steps * self.step_seconds / 3600

    @property
    def device_hours(self) -> float:
        """Of all ranks together."""
        return self.hours * self.ranks

    @property
    def reason(self) -> str:
        """The step and what it rests on, in words."""
        return (
            f"{seconds_text(self.step_seconds)} a step: MFU {100 * self.mfu:.0f} %, estimated from published runs "
            "(docs/scale.md)"
        )


def training_time(config: RunConfig, stage: saves.Stage, *, ranks: int, nodes: int, chip: Device) -> Duration:
    """The estimate for a stage on that many ranks and nodes."""
    seconds = saves.estimated_step(config, stage, ranks, nodes, chip)
    work = step_flops(config) if stage == "lm" else autoencoder_step_flops(config)
    mfu = work / (ranks * chip.peak * seconds)
    return Duration(saves.training_of(config, stage).steps, seconds, ranks, mfu)
