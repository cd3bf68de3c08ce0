"""A package of a user's: a head trained with the maximum mean discrepancy, described without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from calm_scale.accounting.activations import Saved, element
from calm_scale.accounting.components import linear
from calm_scale.config.lm import HeadConfig
from calm_scale.config.section import RESULTS


class MmdHead(HeadConfig):
    """One hidden layer on (noise, hidden state)."""

    kind: Literal["some_package:MmdHead"] = "some_package:MmdHead"
    """The head's name."""
    num_samples: Annotated[int, RESULTS] = Field(default=4, ge=2)
    """Samples of the head at each position in the loss, N."""

    def components(self, run, *, shared_condition=True):
        d, latent = run.require_lm().backbone.hidden_size, run.latent_size
        layers = (
            linear("head.mix", "head", 2 * d, d, bias=True),
            linear("head.out", "head", d, latent, bias=True),
        )
        return [replace(c, uses=self.num_samples, per_step=0, per_draw=1) for c in layers]

    def kept_bytes(self, run, rows):
        return Saved(self.num_samples * element(run.require_lm()) * 5 * run.require_lm().backbone.hidden_size)

    def build(self, stage, latent_size):
        from some_package.module import MmdModule

        return MmdModule(stage.backbone.hidden_size, latent_size, self.num_samples)


def inverse_root(optimizer, step, total_steps):
    """A learning-rate schedule of the package."""
    return optimizer.lr * (2 / step) ** 0.5
