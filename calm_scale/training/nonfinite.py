"""What happens when a step is not finite: skipped and counted, up to a limit; what is saved meanwhile is suspect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from calm_scale.checkpoint.card import Card
from calm_scale.config.errors import EXIT_NONFINITE, CalmScaleError
from calm_scale.config.training import TrainingConfig
from calm_scale.training.engine import StepResult

_ADVICE = (
    "Change what made the run diverge (learning rate, clipping, data), then start it again: it resumes from the newest "
    "checkpoint before these steps"
)


class NonFiniteError(CalmScaleError):
    """The run stopped because its numbers are no longer finite; nothing of that is resumed unasked."""

    exit_code: int = EXIT_NONFINITE


@dataclass
class NonFiniteGuard:
    """Judges every step, the same on all ranks because every rank has the same result.

    A skipped step advances the step count, the data position and the learning rate like any other: the batch that
    caused it is not tried again.

    Attributes:
        consecutive: skipped steps in a row up to now.
        last_finite: the last finite step of this attempt; None before the first.
    """

    config: TrainingConfig
    skipped_steps: int = 0
    consecutive: int = 0
    last_finite: int | None = None
    _doubt: str = ""

    def resume(self, card: Card) -> None:
        """Goes on from what a checkpoint says."""
        self.skipped_steps = card.counters.skipped_steps
        self.consecutive = card.counters.consecutive_skips
        self._doubt = card.suspect

    def doubt(self, *, at_end: bool) -> str:
        """Why the present state should not be resumed unasked; empty where nothing is known against it.

        ``at_end``: no further step will show whether a held-out loss that was not finite came from the model.
        """
        if self.consecutive:
            return (
                f"the last {self.consecutive} steps were not finite"
                if self.consecutive > 1
                else ("the last step was not finite")
            )
        return self._doubt if at_end else ""

    def judge(self, step: int, result: StepResult) -> str | None:
        """A warning for people, or None.

        Raises:
            NonFiniteError: too many in a row, or any with ``on_nonfinite: stop``, or an update that went through.
        """
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if finite and not result.skipped:
            self.consecutive, self._doubt, self.last_finite = 0, "", step
            return None
        what = f"step {step}: loss {result.loss:g}, gradient norm {result.grad_norm:g}"
        if not result.skipped:
            raise NonFiniteError(
                f"{what}: not finite, and the update was applied; resume from the newest checkpoint"
            )
        self.skipped_steps += 1
        self.consecutive += 1
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(f"{what}: not finite, and training.on_nonfinite is `stop`. {_ADVICE}")
        if self.consecutive >= self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{what}: {self.consecutive} steps in a row were not finite (training.max_nonfinite_steps). {_ADVICE}"
            )
        return f"{what}: not finite, update skipped on all ranks ({self.skipped_steps} so far)"

    def judge_evaluation(self, step: int, scores: Mapping[str, float]) -> str | None:
        """A warning where the held-out loss is not finite, or None."""
        if is_finite_evaluation(scores):
            self._doubt = ""
            return None
        self._doubt = f"the held-out loss at step {step} is not finite"
        return self._doubt


def is_finite_evaluation(scores: Mapping[str, float]) -> bool:
    """Whether the held-out loss is a number."""
    return math.isfinite(scores.get("loss", 0.0))
