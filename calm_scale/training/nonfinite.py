"""What happens when a step is not finite: skipped and counted, up to a limit; never saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from calm_scale.config.base import CalmScaleError
from calm_scale.config.training import TrainingConfig
from calm_scale.training.engine import StepResult


class NonFiniteError(CalmScaleError):
    """The run stopped because its numbers are no longer finite; nothing of that was saved."""


@dataclass
class NonFiniteGuard:
    """Judges every step, the same on all ranks because every rank has the same result.

    A skipped step advances the step count, the data position and the learning rate like any other: the batch that
    caused it is not tried again.
    """

    config: TrainingConfig
    skipped_steps: int = 0
    consecutive: int = 0

    def judge(self, step: int, result: StepResult) -> str | None:
        """A warning for people, or None.

        Raises:
            NonFiniteError: too many in a row, or any with ``on_nonfinite: stop``, or an update that went through.
        """
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if finite and not result.skipped:
            self.consecutive = 0
            return None
        what = f"step {step}: loss {result.loss:g}, gradient norm {result.grad_norm:g}"
        if not result.skipped:
            raise NonFiniteError(
                f"{what}: not finite, and the update was applied; resume from the newest checkpoint"
            )
        self.skipped_steps += 1
        self.consecutive += 1
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(f"{what}: not finite; training.on_nonfinite is `stop`")
        if self.consecutive >= self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{what}: {self.consecutive} steps in a row were not finite (training.max_nonfinite_steps)"
            )
        return f"{what}: not finite, update skipped on all ranks ({self.skipped_steps} so far)"
