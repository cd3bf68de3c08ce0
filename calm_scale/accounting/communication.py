"""Bytes every rank exchanges in one optimizer step, by group and collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from calm_scale.accounting.activations import FP32, element
from calm_scale.accounting.components import Component, parameters_of
from calm_scale.accounting.model_components import autoencoder_components, is_autoregressive
from calm_scale.accounting.placement import StageParameters, stage_parameters
from calm_scale.config.run import RunConfig

Group = Literal["tensor", "pipeline", "data"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


PERSISTED = 100_000
"""DeepSpeed keeps weights of up to so many elements whole on every rank under ZeRO 3."""


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of one rank in one step.

    Attributes:
        group: the ranks that take part.
        size: how many they are.
        operation: the collective; ``send`` is to one neighbour.
        what: what is exchanged.
        count: calls per step.
        bytes: size of the full tensors of all these calls together (the gathered size, the reduced size).
    """

    group: Group
    size: int
    operation: Operation
    what: str
    count: int
    bytes: float

    @property
    def wire(self) -> float:
        """Bytes this rank sends with ring algorithms: 2(n − 1)/n for an all-reduce, (n − 1)/n for its halves."""
        if self.operation == "send":
            return self.bytes
        share = (self.size - 1) / self.size
        return self.bytes * share * (2 if self.operation == "all_reduce" else 1)


def language_model(config: RunConfig, data_parallel: int) -> list[list[Traffic]]:
    """Traffic of one rank of every pipeline stage in one step."""
    micro_batches = config.require_lm().training.accumulation(data_parallel)
    return [
        [
            *_tensor(config, held, micro_batches),
            *_pipeline(config, held, micro_batches),
            *_data(config, held, data_parallel),
        ]
        for held in stage_parameters(config)
    ]


def autoencoder(config: RunConfig, world_size: int) -> list[Traffic]:
    """Traffic of one rank of autoencoder training in one step; fp32 gradients and weights.

    ZeRO 0 and 1 reduce the gradients once a step, 2 and 3 after every micro-batch; 1 and 2 gather the updated
    weights. ZeRO 3 gathers its large weights once for every micro-batch and its small ones after the update.
    """
    stage = config.require_autoencoder()
    if world_size == 1:
        return []
    components = autoencoder_components(config)
    whole = FP32 * parameters_of(components)
    passes, zero = stage.training.accumulation(world_size), stage.zero.stage
    reductions = passes if zero >= 2 else 1
    reduce: Operation = "reduce_scatter" if zero == 3 else "all_reduce"
    found = [Traffic("data", world_size, reduce, "gradients", reductions, reductions * whole)]
    if zero in (1, 2):
        found.append(Traffic("data", world_size, "all_gather", "weights", 1, whole))
    if zero == 3:
        large = FP32 * sum(size for size in _tensor_sizes(components) if size > PERSISTED)
        found.append(Traffic("data", world_size, "all_gather", "large weights", passes, passes * large))
        found.append(Traffic("data", world_size, "all_gather", "small weights", 1, whole - large))
    return found


def _tensor_sizes(components: Iterable[Component]) -> Iterable[int]:
    """Elements of the weight tensors: gate and up are two, biases are their own."""
    for c in components:
        if c.name.endswith("gate_up"):
            yield from (c.parameters // 2, c.parameters // 2)
        else:
            yield c.parameters


def wire_bytes(traffic: Iterable[Traffic], group: Group) -> float:
    """Bytes one rank sends in one group."""
    return sum(item.wire for item in traffic if item.group == group)


def _tensor(config: RunConfig, held: StageParameters, micro_batches: int) -> list[Traffic]:
    lm = config.require_lm()
    size = lm.parallel.tensor
    if size == 1:
        return []
    found = _layers(config, held, micro_batches)
    if held.stage == 0:
        found += _input(config, micro_batches)
    if held.stage == lm.parallel.pipeline - 1:
        found += _output(config, held, micro_batches)
    return found


def _layers(config: RunConfig, held: StageParameters, micro_batches: int) -> list[Traffic]:
    """Two reductions a layer and direction; sequence parallelism splits each in two and gathers inputs again."""
    lm = config.require_lm()
    size, hidden = lm.parallel.tensor, _hidden_bytes(config)
    layers = sum(held.layers) * micro_batches
    forwards = 2 if lm.parallel.recompute == "full" else 1
    if not lm.parallel.sequence_parallel:
        calls = layers * (2 * forwards + 2)
        return [Traffic("tensor", size, "all_reduce", "layers", calls, calls * hidden)]
    gathers, scatters = layers * (2 * forwards + 4), layers * (2 * forwards + 2)
    return [
        Traffic("tensor", size, "all_gather", "layers", gathers, gathers * hidden),
        Traffic("tensor", size, "reduce_scatter", "layers", scatters, scatters * hidden),
        Traffic("tensor", size, "all_reduce", "norm gradients", 1, FP32 * _sequence_parallel(config, held)),
    ]


def _sequence_parallel(config: RunConfig, held: StageParameters) -> int:
    """Parameters that see only a slice of the positions under sequence parallelism: norms and full biases."""
    lm = config.require_lm()
    d, count = lm.backbone.hidden_size, 2 * sum(held.layers)
    if held.stage == lm.parallel.pipeline - 1:
        count += 1
    if held.stage == 0 and not is_autoregressive(config):
        count += 2 + (1 if lm.input_mode != "continuous" else 0)
    latent = (config.latent_size + 1) * d if held.stage == 0 and lm.input_mode != "discrete" else 0
    return count * d + latent


def _input(config: RunConfig, micro_batches: int) -> list[Traffic]:
    """Embeddings of the K tokens (summed over the vocabulary shards), and the two-layer compressor."""
    lm = config.require_lm()
    size, hidden, m = lm.parallel.tensor, _hidden_bytes(config), micro_batches
    embedded = hidden * config.patch_size
    has_tokens, has_layers = lm.input_mode != "continuous", not is_autoregressive(config)
    found: list[Traffic] = []
    sequence = lm.parallel.sequence_parallel
    if has_tokens:
        reduce: Operation = "reduce_scatter" if sequence else "all_reduce"
        found.append(Traffic("tensor", size, reduce, "embeddings", m, m * embedded))
        if sequence:
            found.append(Traffic("tensor", size, "all_gather", "embedding gradients", m, m * embedded))
    if has_tokens and has_layers and sequence:
        found.append(Traffic("tensor", size, "all_gather", "compressor", 3 * m, m * (2 * embedded + hidden)))
        found.append(Traffic("tensor", size, "reduce_scatter", "compressor", 2 * m, m * (embedded + hidden)))
    elif has_tokens and has_layers:
        found.append(Traffic("tensor", size, "all_reduce", "compressor", 2 * m, m * (embedded + hidden)))
    return found


def _output(config: RunConfig, held: StageParameters, micro_batches: int) -> list[Traffic]:
    """Hidden states of the owned positions and, once a step, the head's partial gradients; or what the head itself
    exchanges, where its weights are split."""
    lm = config.require_lm()
    size, hidden, m = lm.parallel.tensor, _hidden_bytes(config), micro_batches
    sequence = lm.parallel.sequence_parallel
    if lm.predicts_tokens or lm.parallel.head_parallelism == "tensor":
        return list(lm.head.traffic(config, hidden, m))
    gradients = FP32 * held.position_parallel
    found = [Traffic("tensor", size, "all_reduce", "head gradients", 1, gradients)]
    if not sequence:
        found.append(Traffic("tensor", size, "all_gather", "hidden gradients", m, m * hidden))
    return found


def _pipeline(config: RunConfig, held: StageParameters, micro_batches: int) -> list[Traffic]:
    """Hidden states forwards and their gradients backwards, over every boundary of this rank's chunks."""
    parallel = config.require_lm().parallel
    if parallel.pipeline == 1:
        return []
    sequence = parallel.tensor if parallel.sequence_parallel else 1
    one = _hidden_bytes(config) / sequence
    is_first, is_last = held.stage == 0, held.stage == parallel.pipeline - 1
    forward = (parallel.virtual_pipeline - (1 if is_last else 0)) * micro_batches
    backward = (parallel.virtual_pipeline - (1 if is_first else 0)) * micro_batches
    return [
        Traffic("pipeline", parallel.pipeline, "send", what, count, count * one)
        for what, count in (("hidden states", forward), ("hidden gradients", backward))
        if count
    ]


def _data(config: RunConfig, held: StageParameters, data_parallel: int) -> list[Traffic]:
    lm = config.require_lm()
    if data_parallel == 1:
        return []
    gradients = FP32 * held.trained
    if not lm.parallel.distributed_optimizer:
        return [Traffic("data", data_parallel, "all_reduce", "gradients", 1, gradients)]
    return [
        Traffic("data", data_parallel, "reduce_scatter", "gradients", 1, gradients),
        Traffic("data", data_parallel, "all_gather", "weights", 1, element(lm) * held.trained),
    ]


def _hidden_bytes(config: RunConfig) -> float:
    """One micro-batch of hidden states [P, b, d]."""
    lm = config.require_lm()
    return float(element(lm) * lm.training.micro_batch * lm.backbone.positions * lm.backbone.hidden_size)
