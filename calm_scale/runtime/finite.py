"""Where numbers leave a model or a training: are they finite? Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calm_scale.config.errors import CalmScaleError

if TYPE_CHECKING:
    from torch import Tensor


class ModelOutputError(CalmScaleError):
    """A model gives numbers that are not finite: its training diverged, or its weights are damaged."""


def require_finite(values: Tensor, what: str) -> Tensor:
    """``values`` (any shape), where all of them are finite. Everything that leaves a trained model passes here.

    Args:
        what: the name of these numbers in the message.

    Raises:
        ModelOutputError: a NaN or an infinity among them.
    """
    if bool(values.isfinite().all()):
        return values
    count = values.numel() - int(values.isfinite().sum())
    raise ModelOutputError(
        f"the model's output is not finite: {count:,} of {values.numel():,} numbers of its {what} are NaN or infinite. "
        "Take a checkpoint from before its training diverged (`calm-scale ckpt ls` lists them)"
    )


def finite_floats(row: Mapping[str, Any]) -> dict[str, float]:
    """The floats of a row of metrics that are finite: what a card, an export and wandb can store."""
    return {name: value for name, value in row.items() if isinstance(value, float) and math.isfinite(value)}
