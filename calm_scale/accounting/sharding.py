"""What one rank of one pipeline stage holds: components by stage, and how tensor parallelism cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from calm_scale.accounting.autoencoder_model import autoencoder_components, model_of
from calm_scale.accounting.backbone_model import (
    input_components,
    is_autoregressive,
    layer_components,
    lm_of,
)
from calm_scale.accounting.components import Component, parameters_of
from calm_scale.accounting.layout import balance
from calm_scale.accounting.model import head_components
from calm_scale.config.run import RunConfig

ROW_PARALLEL = "input.contract"
HEAD_COLUMNS = ("condition", "sample", "gate_up")
HEAD_ROWS = ("hidden", "down")


@dataclass(frozen=True)
class StageParameters:
    """Parameters on one rank of one pipeline stage.

    Attributes:
        trained: weights with gradient and optimizer state.
        position_parallel: those of them (the head) whose gradients are summed over the tensor-parallel group.
        frozen: the frozen autoencoder, which every rank loads, and the table of its encoder where it encodes.
    """

    stage: int
    layers: tuple[int, ...]
    trained: int
    position_parallel: int
    frozen: int


def stage_parameters(config: RunConfig) -> list[StageParameters]:
    """Parameters per rank, for every pipeline stage in order."""
    parallel = lm_of(config).parallel
    layers, stages = balance(config), parallel.pipeline
    one_layer = sum(local_parameters(config, c) for c in _one_layer(config))
    frozen = 0 if is_autoregressive(config) else parameters_of(autoencoder_components(config))
    table = config.vocab_size * model_of(config).hidden_size
    reads_latents = lm_of(config).input_mode != "discrete"
    found = []
    for stage in range(stages):
        mine = layers[stage::stages]
        first, last = stage == 0, stage == stages - 1
        trained = sum(mine) * one_layer
        if first:
            trained += sum(local_parameters(config, c) for c in input_components(config))
        head = 0
        if last:
            trained += lm_of(config).backbone.hidden_size
            head = sum(local_parameters(config, c) for c in head_components(config))
        replicated_head = last and not is_autoregressive(config) and parallel.head_parallelism == "position"
        found.append(
            StageParameters(
                stage=stage,
                layers=mine,
                trained=trained + head,
                position_parallel=head if replicated_head and parallel.tensor > 1 else 0,
                frozen=frozen + (table if frozen and (last or (first and reads_latents)) else 0),
            )
        )
    return found


def local_parameters(config: RunConfig, component: Component) -> int:
    """This component's parameters on one tensor-parallel rank.

    Vocabulary tables are padded to a multiple of the group first. Norms, the latent input and the head (each rank
    computes its own positions) are replicated, unless the weights of the head's blocks are split; a row-parallel
    layer keeps its whole bias.
    """
    tensor, d = lm_of(config).parallel.tensor, lm_of(config).backbone.hidden_size
    if component.part in ("embedding", "output"):
        return -(-config.vocab_size // tensor) * d
    last_name = component.name.rsplit(".", 1)[-1]
    splits_head = (
        component.name.startswith("head.block.") and lm_of(config).parallel.head_parallelism == "tensor"
    )
    if component.name == ROW_PARALLEL or (splits_head and last_name in HEAD_ROWS):
        return (component.parameters - d) // tensor + d
    if splits_head and last_name in HEAD_COLUMNS:
        return component.parameters // tensor
    if component.part == "head" or "norm" in component.name or component.name == "input.latent":
        return component.parameters
    return component.parameters // tensor


def _one_layer(config: RunConfig) -> tuple[Component, ...]:
    return layer_components(lm_of(config).backbone, 0)
