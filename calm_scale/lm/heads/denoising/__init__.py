"""The flow and diffusion heads without torch: settings, parameters, FLOPs, activation bytes. Their modules are beside.

Both evaluate one network: time is embedded by a two-layer MLP, the condition is projected once per position, and every
block is modulated by adaLN (3 vectors a block, 2 in the final layer).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from calm_scale.accounting.activations import FP32, Saved, element
from calm_scale.accounting.components import Component, linear, weights
from calm_scale.config.lm import BlockHeadConfig, LMStage
from calm_scale.config.run import RunConfig
from calm_scale.config.section import RESULTS, SAFE, Policy

if TYPE_CHECKING:
    from calm_scale.lm.heads.denoising.module import DiffusionHead, FlowHead

TIME_FEATURES = 256
"""Sinusoids of the time embedding."""


class DenoisingHeadConfig(BlockHeadConfig):
    """A head that walks from noise to the latent in several evaluations of one network."""

    num_repeats: Annotated[int, RESULTS] = Field(default=8, ge=1)
    """Times and noises drawn at each position in the loss."""

    @property
    @abstractmethod
    def evaluations(self) -> int:
        """Evaluations of the network for one sample."""

    @property
    def repeats(self) -> int:
        """R times and noises."""
        return self.num_repeats

    def components(self, run: RunConfig, *, shared_condition: bool = True) -> Sequence[Component]:
        """(x_t, t, h) → velocity or noise ``[l]``; what depends on h alone is always shared."""
        stage = run.require_lm()
        return _network(
            stage.num_blocks,
            stage.backbone.hidden_size,
            run.latent_size,
            self.num_repeats,
            self.evaluations,
        )

    def kept_bytes(self, run: RunConfig, rows: int) -> Saved:
        """Time and condition, blocks of ten vectors for each repeat, final layer, the regression's three vectors."""
        lm, repeats, latent = run.require_lm(), self.num_repeats, run.latent_size
        d, w = lm.backbone.hidden_size, element(lm)
        embedding = w * (d + repeats * (TIME_FEATURES + 4 * d + latent))
        blocks = w * lm.num_blocks * 10 * repeats * d
        return Saved(embedding + blocks + repeats * d * (3 * w + FP32) + 3 * FP32 * repeats * latent)


class FlowHeadConfig(DenoisingHeadConfig):
    """Flow matching with a midpoint sampler (Figs. 8–9)."""

    kind: Literal["flow"] = "flow"
    """The head's name."""
    sampling_steps: Annotated[int, SAFE] = Field(default=4, ge=1)
    """Steps of the sampler."""

    @property
    def evaluations(self) -> int:
        """Two a midpoint step."""
        return 2 * self.sampling_steps

    def build(self, stage: LMStage, latent_size: int) -> FlowHead:
        """The torch module."""
        from calm_scale.lm.heads.denoising.module import FlowHead

        return FlowHead(
            stage.backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            num_repeats=self.num_repeats,
            sampling_steps=self.sampling_steps,
        )


class DiffusionHeadConfig(DenoisingHeadConfig):
    """Cosine-schedule diffusion with an ancestral sampler (Figs. 8–9)."""

    kind: Literal["diffusion"] = "diffusion"
    """The head's name."""
    train_timesteps: Annotated[int, Policy("results", model=True)] = Field(default=1000, ge=2)
    """Timesteps of the noise schedule."""
    sampling_steps: Annotated[int, SAFE] = Field(default=100, ge=1)
    """Steps of the sampler."""

    @property
    def evaluations(self) -> int:
        """One a reverse step."""
        return min(self.sampling_steps, self.train_timesteps)

    def build(self, stage: LMStage, latent_size: int) -> DiffusionHead:
        """The torch module."""
        from calm_scale.lm.heads.denoising.module import DiffusionHead

        return DiffusionHead(
            stage.backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            num_repeats=self.num_repeats,
            train_timesteps=self.train_timesteps,
            sampling_steps=self.sampling_steps,
        )


@lru_cache(maxsize=64)
def _network(num_blocks: int, d: int, latent: int, repeats: int, evaluations: int) -> tuple[Component, ...]:
    def each(component: Component) -> Component:
        return replace(component, uses=repeats, per_step=0, per_draw=evaluations)

    found = [
        each(linear("head.input", "head", latent, d, bias=True, backward=1)),
        each(linear("head.time.0", "head", TIME_FEATURES, d, bias=True, backward=1)),
        each(linear("head.time.1", "head", d, d, bias=True)),
        linear("head.condition", "head", d, d, bias=True),
    ]
    for i in range(num_blocks):
        block = f"head.adaln.{i}"
        found += [
            weights(f"{block}.norm", "head", 2 * d),
            each(linear(f"{block}.modulation", "head", d, 3 * d, bias=True)),
            each(linear(f"{block}.hidden", "head", d, d, bias=True)),
            each(linear(f"{block}.out", "head", d, d, bias=True)),
        ]
    return (
        *found,
        each(linear("head.final.modulation", "head", d, 2 * d, bias=True)),
        each(linear("head.final.out", "head", d, latent, bias=True)),
    )
