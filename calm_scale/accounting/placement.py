"""Which layers stand on which pipeline stage, what one rank of it holds, and what the schedule can reach.

The embedding and the input compressor stand on the first stage; the head with its N samples, the loss and the
frozen encoder (or the output projection of the AR baseline) on the last, which therefore gets fewer layers."""

from __future__ import annotations

from dataclasses import dataclass

from calm_scale.accounting.components import Component, parameters_of
from calm_scale.accounting.model_components import (
    autoencoder_components,
    head_components,
    input_components,
    input_encoder,
    is_autoregressive,
    layer_components,
    loss_components,
    model_of,
    recomputed,
    target_encoder,
)
from calm_scale.config.run import RunConfig


@dataclass(frozen=True)
class LayerCosts:
    """Training MACs per position, recomputation included: input side, one layer, output side."""

    first: int
    layer: int
    last: int


@dataclass(frozen=True)
class StageShare:
    """One pipeline rank: its layers per chunk, its cost and its share of one step's arithmetic."""

    stage: int
    layers: tuple[int, ...]
    cost: int
    share: float


@dataclass(frozen=True)
class PipelineBound:
    """What a 1F1B (or interleaved) schedule can reach.

    Attributes:
        imbalance: heaviest stage / mean stage (1 is perfect).
        bubble: idle share of a step from filling and draining, (p − 1) / (v·m + p − 1).
        efficiency: upper bound on useful time, (1 / imbalance) · (1 − bubble).
    """

    imbalance: float
    bubble: float
    efficiency: float


def layer_costs(config: RunConfig) -> LayerCosts:
    """Training MACs per position (forward, backward, recomputation) of the three kinds of stage content."""
    recompute = config.require_lm().parallel.recompute
    layer = layer_components(config.require_lm().backbone, 0)
    first = [*input_components(config), *input_encoder(config)]
    last = [*head_components(config), *loss_components(config), *target_encoder(config)]
    return LayerCosts(
        *(sum(c.training + recomputed(c, recompute) for c in part) for part in (first, layer, last))
    )


def balance(config: RunConfig) -> tuple[int, ...]:
    """Layers of each pipeline chunk, in model order (length pipeline × virtual_pipeline, at least one each).

    Chunk c stands on pipeline rank c mod p. An explicit list is returned as it stands, ``even`` splits evenly,
    ``auto`` gives every layer in turn to the rank with the least work so far, which minimises the heaviest
    rank because all layers cost the same.
    """
    lm = config.require_lm()
    parallel, num_layers = lm.parallel, lm.backbone.num_layers
    num_chunks = parallel.pipeline * parallel.virtual_pipeline
    if isinstance(parallel.pipeline_layout, tuple):
        return parallel.pipeline_layout
    if parallel.pipeline_layout == "even":
        return (num_layers // num_chunks,) * num_chunks
    return _spread(num_layers, parallel.pipeline, num_chunks, layer_costs(config))


def stage_shares(config: RunConfig) -> list[StageShare]:
    """Cost of every pipeline rank under :func:`balance`."""
    parallel = config.require_lm().parallel
    layers, costs = balance(config), layer_costs(config)
    by_rank = [layers[rank :: parallel.pipeline] for rank in range(parallel.pipeline)]
    work = [sum(mine) * costs.layer for mine in by_rank]
    work[0] += costs.first
    work[-1] += costs.last
    return [
        StageShare(rank, mine, cost, cost / sum(work))
        for rank, (mine, cost) in enumerate(zip(by_rank, work, strict=True))
    ]


def pipeline_bound(config: RunConfig, num_micro_batches: int) -> PipelineBound:
    """Imbalance, bubble and the efficiency they leave, for ``num_micro_batches`` per rank and step."""
    parallel = config.require_lm().parallel
    costs = [share.cost for share in stage_shares(config)]
    imbalance = max(costs) * len(costs) / sum(costs)
    fill = parallel.pipeline - 1
    bubble = fill / (parallel.virtual_pipeline * num_micro_batches + fill)
    return PipelineBound(imbalance, bubble, (1 - bubble) / imbalance)


def _spread(num_layers: int, num_ranks: int, num_chunks: int, costs: LayerCosts) -> tuple[int, ...]:
    layers = [1] * num_chunks
    chunk_work = [costs.layer] * num_chunks
    chunk_work[0] += costs.first
    chunk_work[-1] += costs.last
    for _ in range(num_layers - num_chunks):
        rank = min(range(num_ranks), key=lambda r: (sum(chunk_work[r::num_ranks]), r))
        chunk = min(range(rank, num_chunks, num_ranks), key=lambda c: (chunk_work[c], c))
        layers[chunk] += 1
        chunk_work[chunk] += costs.layer
    return tuple(layers)


ROW_PARALLEL = "input.contract"


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
    parallel = config.require_lm().parallel
    layers, stages = balance(config), parallel.pipeline
    one_layer = sum(local_parameters(config, c) for c in _one_layer(config))
    frozen = 0 if is_autoregressive(config) else parameters_of(autoencoder_components(config))
    table = config.vocab_size * model_of(config).hidden_size
    reads_latents = config.require_lm().input_mode != "discrete"
    found = []
    for stage in range(stages):
        mine = layers[stage::stages]
        first, last = stage == 0, stage == stages - 1
        trained = sum(mine) * one_layer
        if first:
            trained += sum(local_parameters(config, c) for c in input_components(config))
        head = 0
        if last:
            trained += config.require_lm().backbone.hidden_size
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
    tensor, d = config.require_lm().parallel.tensor, config.require_lm().backbone.hidden_size
    if component.part in ("embedding", "output"):
        return -(-config.vocab_size // tensor) * d
    splits_head = config.require_lm().parallel.head_parallelism == "tensor"
    if component.name == ROW_PARALLEL or (splits_head and component.split == "rows"):
        return (component.parameters - component.num_out) // tensor + component.num_out
    if splits_head and component.split == "columns":
        return component.parameters // tensor
    if component.part == "head" or "norm" in component.name or component.name == "input.latent":
        return component.parameters
    return component.parameters // tensor


def _one_layer(config: RunConfig) -> tuple[Component, ...]:
    return layer_components(config.require_lm().backbone, 0)
