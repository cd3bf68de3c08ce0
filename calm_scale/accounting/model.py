"""The whole model of a run, component by component; what every other account is computed from."""

from __future__ import annotations

from dataclasses import replace

from calm_scale.accounting.autoencoder_model import autoencoder_components, frozen_decoder, frozen_encoder
from calm_scale.accounting.backbone_model import (
    backbone_components,
    input_components,
    is_autoregressive,
    softmax_output,
)
from calm_scale.accounting.components import Component, Part, by_part, parameters_of
from calm_scale.accounting.head_model import denoiser, energy_head, energy_loss
from calm_scale.config.lm import EnergyHeadConfig, SoftmaxHeadConfig
from calm_scale.config.run import RunConfig


def head_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """The head of the run (energy, flow, diffusion or softmax), without loss and frozen autoencoder."""
    lm = config.require_lm()
    d = lm.backbone.hidden_size
    if isinstance(lm.head, SoftmaxHeadConfig):
        return softmax_output(config)
    if isinstance(lm.head, EnergyHeadConfig):
        head = energy_head(lm.head, lm.num_blocks, d, config.latent_size, shared_condition=shared_condition)
        return list(head)
    return list(denoiser(lm.head, lm.num_blocks, d, config.latent_size))


def loss_components(config: RunConfig) -> list[Component]:
    """Pairwise terms of the energy loss; nothing for the other heads (their losses are element-wise)."""
    head = config.require_lm().head
    return energy_loss(head, config.latent_size) if isinstance(head, EnergyHeadConfig) else []


def input_encoder(config: RunConfig) -> list[Component]:
    """The frozen encoder in front of the first stage; nothing unless the model reads latents."""
    if config.require_lm().input_mode == "discrete":
        return []
    return [replace(c, parameters=0, per_step=c.uses) for c in frozen_encoder(config) if c.forward]


def target_encoder(config: RunConfig) -> list[Component]:
    """The frozen encoder beside the head, which gives the posterior of the next patch; nothing for the baseline."""
    return [] if is_autoregressive(config) else frozen_encoder(config)


def frozen_components(config: RunConfig) -> list[Component]:
    """Frozen autoencoder beside the language model: encoder while training, decoder while generating.

    A model that reads latents encodes every patch twice while training (as input on the first stage, as target on
    the last) and once while generating.
    """
    if is_autoregressive(config):
        return []
    return [*target_encoder(config), *input_encoder(config), *frozen_decoder(config)]


def trained_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """Every component the language model trains."""
    return [
        *input_components(config),
        *backbone_components(config),
        *head_components(config, shared_condition=shared_condition),
    ]


def lm_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """Language model, loss and frozen autoencoder, per position of P."""
    return [
        *trained_components(config, shared_condition=shared_condition),
        *loss_components(config),
        *frozen_components(config),
    ]


def recomputed(component: Component, mode: str) -> int:
    """Forward MACs per position that the backward pass runs again.

    ``full``: every layer, and every block of the energy head up to its last product, whose result nothing needs;
    ``selective``: core attention.
    """
    in_block = component.name.startswith("head.block.") and not component.name.endswith(".down")
    in_layer = component.part == "backbone" or in_block
    if (mode == "full" and in_layer) or (mode == "selective" and component.attention):
        return component.training_forward
    return 0


def parameters(config: RunConfig) -> dict[str, int]:
    """Trained parameters by part: ``embedding``, ``input``, ``backbone``, ``head`` or ``output``, and ``autoencoder``.

    The whole model, never one shard of it, whatever the layout. Sections that are absent do not appear.
    """
    counts: dict[str, int] = {}
    if config.lm is not None:
        parts: dict[Part, list[Component]] = by_part(trained_components(config))
        counts |= {part: parameters_of(found) for part, found in parts.items()}
    if config.autoencoder is not None or (config.lm is not None and not is_autoregressive(config)):
        counts["autoencoder"] = parameters_of(autoencoder_components(config))
    return counts


def lm_parameters(config: RunConfig) -> int:
    """Trained parameters of the language model, without the frozen autoencoder."""
    return parameters_of(trained_components(config))
