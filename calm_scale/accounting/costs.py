"""FLOPs per token, patch, step and run, from the components.

Convention (printed with every report): 2 FLOPs per multiply-accumulate of a matrix product; look-ups, norms,
activations and softmax not counted; backward exact (2× forward, 1× where an input needs no gradient, 0 where
frozen); attention full over P positions, the causal count beside it; every position counts; a patch's cost is
divided by K. *Model* FLOPs are what the method needs, *hardware* FLOPs add what recomputation runs again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from calm_scale.accounting.components import FLOPS_PER_MAC, Component, Part, causal
from calm_scale.accounting.model_components import autoencoder_components, lm_components, recomputed
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.run import RunConfig

CONVENTION = (
    "1 multiply-accumulate = 2 FLOPs. Matrix products only: embedding look-ups, norms, activations and softmax are "
    "not counted; the vocabulary projection is. Backward is counted exactly: twice the forward, once where an input "
    "needs no gradient, nothing where weights are frozen. Attention is counted full over all positions (the causal "
    "count is shown beside it). CALM runs its head for N samples while training and once while generating; what "
    "depends on the hidden state alone is computed once per position. The frozen encoder counts forward while "
    "training, the decoder with its vocabulary projection while generating, and the autoencoder's own training is "
    "added to a run. A patch's cost is divided by its K tokens. Model FLOPs are what the method needs; hardware "
    "FLOPs add what recomputation runs a second time."
)

Attention = Literal["full", "causal"]


@dataclass(frozen=True)
class Row:
    """One line of the component table; FLOPs are per token.

    Attributes:
        part: room of the model.
        name: component, equal ones of all layers or blocks added up.
        copies: how many were added up.
        parameters: weights it owns.
        forward: training forward FLOPs.
        backward: training backward FLOPs.
        recompute: forward FLOPs run again because of activation recomputation.
        inference: FLOPs of generating one token with one draw.
    """

    part: Part
    name: str
    copies: int
    parameters: int
    forward: float
    backward: float
    recompute: float
    inference: float

    @property
    def training(self) -> float:
        """Model FLOPs per token, forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class TokenCosts:
    """FLOPs per token: what training does, what generating does.

    ``training`` and ``inference`` follow the convention (full attention), ``*_causal`` halve the attention
    products, ``hardware`` adds recomputation to ``training``.
    """

    training: float
    training_causal: float
    hardware: float
    inference: float
    inference_causal: float


@dataclass(frozen=True)
class RunTotals:
    """FLOPs of whole trainings as configured (or at ``tokens`` where given)."""

    lm_tokens: int
    lm: float
    lm_hardware: float
    autoencoder_tokens: int
    autoencoder: float

    @property
    def total(self) -> float:
        """Language model and autoencoder, model FLOPs."""
        return self.lm + self.autoencoder


def component_table(config: RunConfig) -> list[Row]:
    """Language model, loss and frozen autoencoder by component, equal components of all layers added up."""
    mode = config.require_lm().parallel.recompute
    groups: dict[str, list[Component]] = {}
    for component in lm_components(config):
        groups.setdefault(re.sub(r"\.\d+", "", component.name), []).append(component)
    return [_row(name, found, config.patch_size, mode) for name, found in groups.items()]


def autoencoder_table(config: RunConfig) -> list[Row]:
    """The autoencoder in its own training (stage 1), by component."""
    groups: dict[str, list[Component]] = {}
    for component in autoencoder_components(config):
        groups.setdefault(re.sub(r"\.\d+", "", component.name), []).append(component)
    return [_row(name, found, config.patch_size, "none") for name, found in groups.items()]


def token_costs(config: RunConfig, *, shared_condition: bool = True, num_draws: int = 1) -> TokenCosts:
    """FLOPs per token of training and of generating with ``num_draws`` candidates per position."""
    components = lm_components(config, shared_condition=shared_condition)
    halved = causal(components, config.require_lm().backbone.positions)
    mode, k = config.require_lm().parallel.recompute, config.patch_size
    training = _per_token((c.training for c in components), k)
    return TokenCosts(
        training=training,
        training_causal=_per_token((c.training for c in halved), k),
        hardware=training + _per_token((recomputed(c, mode) for c in components), k),
        inference=_per_token((c.inference(num_draws) for c in components), k),
        inference_causal=_per_token((c.inference(num_draws) for c in halved), k),
    )


def tokens_per_step(config: RunConfig) -> int:
    """Tokens of one optimizer step of the language model: global batch × P × K."""
    lm = config.require_lm()
    return lm.training.global_batch * lm.backbone.positions * config.patch_size


def autoencoder_tokens(config: RunConfig, stage: AutoencoderStage) -> int:
    """Tokens of the whole autoencoder training: steps × global batch × patches × K."""
    return stage.training.steps * stage.training.global_batch * stage.patches * config.patch_size


def autoencoder_training_per_token(config: RunConfig) -> float:
    """FLOPs per token of training the autoencoder, forward and backward."""
    return _per_token((c.training for c in autoencoder_components(config)), config.patch_size)


def step_flops(config: RunConfig) -> float:
    """Model FLOPs of one optimizer step of the language model, over all ranks and whatever the layout."""
    return token_costs(config).training * tokens_per_step(config)


def autoencoder_step_flops(config: RunConfig) -> float:
    """Model FLOPs of one optimizer step of the autoencoder, over all ranks."""
    stage = config.autoencoder
    tokens = autoencoder_tokens(config, stage) / stage.training.steps if stage else 0.0
    return autoencoder_training_per_token(config) * tokens


def evaluation_per_token(config: RunConfig) -> float:
    """FLOPs per token of in-loop evaluation: the training loss, forward only."""
    return _per_token((c.training_forward for c in lm_components(config)), config.patch_size)


def brier_per_token(config: RunConfig) -> float:
    """FLOPs per token of a BrierLM evaluation with S samples at every patch start.

    For K < 4 the score follows ⌈4/K⌉ patches: the later ones are drawn along each sample's own path, so each
    costs a backbone position per sample.
    """
    samples, components = config.evaluation.num_samples, lm_components(config)
    rolled = -(-4 // config.patch_size) - 1
    first = sum(c.inference(samples) for c in components)
    later = sum(c.inference(1) for c in components) * samples
    return _per_token([first + rolled * later], config.patch_size)


def run_totals(
    config: RunConfig,
    *,
    tokens: int | None = None,
    autoencoder_training_tokens: int | None = None,
    shared_condition: bool = True,
) -> RunTotals:
    """FLOPs of the whole run: language model and, unless it is the AR baseline, its autoencoder."""
    costs = token_costs(config, shared_condition=shared_condition)
    tokens = config.require_lm().training.steps * tokens_per_step(config) if tokens is None else tokens
    if autoencoder_training_tokens is None:
        stage = config.autoencoder
        autoencoder_training_tokens = autoencoder_tokens(config, stage) if stage else 0
    if config.require_lm().predicts_tokens:
        autoencoder_training_tokens = 0
    return RunTotals(
        lm_tokens=tokens,
        lm=costs.training * tokens,
        lm_hardware=costs.hardware * tokens,
        autoencoder_tokens=autoencoder_training_tokens,
        autoencoder=autoencoder_training_per_token(config) * autoencoder_training_tokens,
    )


def _row(name: str, found: list[Component], patch_size: int, mode: str) -> Row:
    return Row(
        part=found[0].part,
        name=name,
        copies=len(found),
        parameters=sum(c.parameters for c in found),
        forward=_per_token((c.training_forward for c in found), patch_size),
        backward=_per_token((c.training_backward for c in found), patch_size),
        recompute=_per_token((recomputed(c, mode) for c in found), patch_size),
        inference=_per_token((c.inference() for c in found), patch_size),
    )


def _per_token(macs: Iterable[int], patch_size: int) -> float:
    return FLOPS_PER_MAC * sum(macs) / patch_size
