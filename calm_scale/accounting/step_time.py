"""Step time of a stage: kernels, collectives and the schedule put together, to rank layouts by.

The constants behind it are fitted to published runs and tested on others (docs/scale.md, benchmarks/plan_accuracy.py).

A ring over g ranks of each node uses g of the node's network ports at once, so its bandwidth per rank is g times one
port, up to the link inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from calm_scale.accounting.activations import FP32, element
from calm_scale.accounting.communication import Group, Traffic, autoencoder, language_model
from calm_scale.accounting.components import Component, parameters_of
from calm_scale.accounting.costs import autoencoder_step_flops, step_flops
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.kernels import (
    OURS,
    OURS_PLAIN,
    KernelSeconds,
    Rates,
    Software,
    autoencoder_seconds,
    micro_batch_seconds,
    rates,
)
from calm_scale.accounting.model_components import (
    autoencoder_components,
    backbone_components,
    head_components,
    input_components,
    input_encoder,
    layer_components,
    loss_components,
    target_encoder,
)
from calm_scale.accounting.placement import StageParameters, stage_parameters
from calm_scale.config.quantities import seconds_text
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import Stage

UPDATE_BYTES = FP32 + 3 * 2 * FP32
"""Per parameter of an AdamW step: the gradient read, fp32 weights and two moments read and written."""

BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's time; the rest is its forward pass."""

ASSUMPTIONS = (
    "{software}: matrix products run at {products:.0%} of the dense peak plus their operands over the memory, "
    "attention (causal) at {attention:.0%}; norms, activations, losses, gradients and the optimizer move their "
    "bytes. Collectives run at the bandwidth of the ports their ranks share: {link:.0f} GB/s inside a node, "
    "{network:.0f} GB/s per device between nodes, each per direction. The reduction of gradients hides behind the "
    "last micro-batch's backward pass and the gathering of weights behind the first one's forward pass; "
    "tensor-parallel collectives and transfers between stages do not hide. "
    "The device's shares are {calibration}; docs/scale.md says how far estimates are off."
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step and what they are made of.

    Attributes:
        compute: matrix products and attention of the heaviest stage, all micro-batches.
        passes: its passes over memory: norms, activations, losses.
        tensor: its tensor-parallel collectives.
        pipeline: its transfers to neighbouring stages.
        bubble: filling and draining the pipeline.
        data: what remains visible of gradient reduction and weight gathering.
        optimizer: reading and writing the optimizer state, and the host's work around a step.
    """

    compute: float
    passes: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, in the order of a step."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def total(self) -> float:
        """One step."""
        return sum(self.parts.values())


def step_time(
    config: RunConfig,
    data_parallel: int,
    device: Device,
    gpus_per_node: int,
    software: Software = OURS,
) -> StepTime:
    """Estimated time of one step of the language model; bounded by its slowest stage."""
    lm, software = config.require_lm(), software.for_run(config)
    parallel, passes = lm.parallel, lm.training.accumulation(data_parallel)
    held, traffic = stage_parameters(config), language_model(config, data_parallel)
    over = rings(parallel.tensor, data_parallel, parallel.pipeline, device, gpus_per_node)
    at = rates(device, software)
    kernels = [seconds.times(passes) for seconds in _stage_seconds(config, held, at)]
    tensor = [
        (1 - software.overlap_tensor) * collective_seconds(items, "tensor", over["tensor"])
        for items in traffic
    ]
    pipeline = [
        (1 - software.overlap_pipeline) * collective_seconds(items, "pipeline", over["pipeline"])
        for items in traffic
    ]
    busy = [k.total + t + p for k, t, p in zip(kernels, tensor, pipeline, strict=True)]
    slowest = busy.index(max(busy))
    return StepTime(
        compute=kernels[slowest].products,
        passes=kernels[slowest].passes,
        tensor=tensor[slowest],
        pipeline=pipeline[slowest],
        bubble=(sum(busy) - busy[slowest]) / (parallel.virtual_pipeline * passes),
        data=max(
            _data_seconds(items, stage, over["data"], seconds / passes, software)
            for items, stage, seconds in zip(traffic, held, busy, strict=True)
        ),
        optimizer=max(_optimizer_bytes(config, stage, data_parallel) for stage in held) / at.memory
        + software.step_seconds,
    )


def slower_without_transformer_engine(
    config: RunConfig, data_parallel: int, device: Device, gpus_per_node: int
) -> float:
    """A step without Transformer Engine over one with it."""
    plain, fused = (
        step_time(config, data_parallel, device, gpus_per_node, software=software).total
        for software in (OURS_PLAIN, OURS)
    )
    return plain / fused


def autoencoder_step_seconds(
    config: RunConfig, world_size: int, device: Device, gpus_per_node: int, software: Software = OURS
) -> float:
    """Estimated seconds of one step of the autoencoder: kernels, fp32 collectives that nothing hides, the update."""
    stage = config.require_autoencoder()
    at = rates(device, software)
    kernels = autoencoder_seconds(config, stage, at).times(stage.training.accumulation(world_size))
    traffic = autoencoder(config, world_size)
    over = ring(world_size, 1, device, gpus_per_node)
    trained = parameters_of(autoencoder_components(config))
    update = UPDATE_BYTES * trained / (world_size if stage.zero.stage else 1) / at.memory
    return kernels.total + collective_seconds(traffic, "data", over) + update + software.step_seconds


def assumptions(device: Device, software: Software = OURS) -> str:
    """What the estimate rests on, in words."""
    at = rates(device, software)
    return ASSUMPTIONS.format(
        software=software.name[0].upper() + software.name[1:],
        products=at.products / device.peak,
        attention=at.attention / device.peak,
        link=device.link / 1e9,
        network=device.network / 1e9,
        calibration=device.calibration,
    )


def _stage_seconds(config: RunConfig, held: Sequence[StageParameters], at: Rates) -> list[KernelSeconds]:
    """One micro-batch through every stage."""
    layer = micro_batch_seconds(config, list(layer_components(config.require_lm().backbone, 0)), at)
    found = [layer.times(sum(stage.layers)) for stage in held]
    first: list[Component] = [*input_components(config), *input_encoder(config)]
    last: list[Component] = [
        backbone_components(config)[-1],
        *head_components(config),
        *loss_components(config),
        *target_encoder(config),
    ]
    found[0] += micro_batch_seconds(config, first, at)
    found[-1] += micro_batch_seconds(config, last, at)
    return found


def _data_seconds(
    traffic: Sequence[Traffic], stage: StageParameters, over: Ring, micro_batch: float, software: Software
) -> float:
    """What the last backward pass does not hide of the reduction, and the first forward pass of the gathering."""
    mine = [item for item in traffic if item.group == "data"]
    gathers = [item for item in mine if item.operation == "all_gather"]
    reduces = [item for item in mine if item.operation != "all_gather"]
    buckets = ceil(software.gradient_bytes * stage.trained / software.bucket_bytes)
    reduce = over.seconds(
        sum(item.wire for item in reduces) * software.gradient_bytes / FP32, buckets if reduces else 0
    )
    calls = 6 * sum(stage.layers) if software.tensors_a_call else buckets
    gather = over.seconds(sum(item.wire for item in gathers), calls if gathers else 0)
    if software.overlap_reduce:
        reduce = max(0.0, reduce - BACKWARD_SHARE * micro_batch)
    if software.overlap_gather:
        gather = max(0.0, gather - (1 - BACKWARD_SHARE) * micro_batch)
    return reduce + gather


def _optimizer_bytes(config: RunConfig, stage: StageParameters, data_parallel: int) -> float:
    """Gradient read, master weights and two moments read and written, weights written; gradients scaled and zeroed."""
    lm = config.require_lm()
    sharded = data_parallel if lm.parallel.distributed_optimizer else 1
    return stage.trained * ((UPDATE_BYTES + element(lm)) / sharded + 2 * FP32)


LINK_SHARE = 0.8
"""Bus bandwidth of large ring collectives inside a node over the link's datasheet figure (nccl-tests: A100 235 of 300
GB/s, H100 365 of 450, B200 682 of 900)."""

NETWORK_SHARE = 0.93
"""The same over a network port (nccl-tests: 46-48 of 50 GB/s, 24 of 25)."""

HOP_SECONDS = 34e-6
HOP_GROWTH = 0.7
"""A call over n nodes costs ``HOP_SECONDS · n^HOP_GROWTH`` beside its bytes (EFA: 55 µs on 2 nodes, 235 on 16)."""


@dataclass(frozen=True)
class Ring:
    """One group of ranks: over how many nodes it reaches, its bytes/s and the seconds a call costs beside its bytes."""

    nodes: int
    bandwidth: float
    call_seconds: float

    def seconds(self, wire: float, calls: float) -> float:
        """``calls`` collectives that send ``wire`` bytes from each rank in all."""
        return wire / self.bandwidth + calls * self.call_seconds


def ring(size: int, stride: int, device: Device, gpus_per_node: int) -> Ring:
    """The group of ``size`` ranks that stand ``stride`` ranks apart, nodes filled in rank order."""
    in_node = min(size, max(1, gpus_per_node // stride))
    nodes = ceil(size / in_node)
    link = LINK_SHARE * device.link
    if nodes == 1:
        return Ring(1, link, device.call_seconds)
    ports = NETWORK_SHARE * device.network * in_node
    return Ring(nodes, min(link, ports), device.call_seconds + HOP_SECONDS * nodes**HOP_GROWTH)


def rings(tensor: int, data: int, pipeline: int, device: Device, gpus_per_node: int) -> dict[Group, Ring]:
    """The groups of a layout; ranks are numbered tensor first, then data, then pipeline."""
    world = tensor * data * pipeline
    neighbours = min(2, pipeline)
    return {
        "tensor": ring(tensor, 1, device, gpus_per_node),
        "data": ring(data, tensor, device, gpus_per_node),
        "pipeline": ring(neighbours, world // pipeline, device, gpus_per_node),
    }


def collective_seconds(traffic: list[Traffic], group: Group, over: Ring) -> float:
    """All collectives of one group in one step."""
    mine = [item for item in traffic if item.group == group]
    return over.seconds(sum(item.wire for item in mine), sum(item.count for item in mine))


@dataclass(frozen=True)
class Duration:
    """A whole stage: ``steps`` of ``step_seconds`` on ``ranks`` devices at that share of their peak (``mfu``)."""

    steps: int
    step_seconds: float
    ranks: int
    mfu: float

    @property
    def hours(self) -> float:
        """Of training alone, without saves and restarts."""
        return self.steps * self.step_seconds / 3600

    @property
    def device_hours(self) -> float:
        """Of all ranks together."""
        return self.hours * self.ranks

    @property
    def reason(self) -> str:
        """The step and what it rests on, in words."""
        return (
            f"{seconds_text(self.step_seconds)} a step: MFU {100 * self.mfu:.0f} %, estimated from published runs "
            "(docs/scale.md)"
        )


def training_time(config: RunConfig, stage: Stage, *, ranks: int, nodes: int, chip: Device) -> Duration:
    """The estimate for a stage on that many ranks and nodes."""
    seconds = estimated_step(config, stage, ranks, nodes, chip)
    work = step_flops(config) if stage == Stage.LM else autoencoder_step_flops(config)
    mfu = work / (ranks * chip.peak * seconds)
    return Duration(config.require_stage(stage).training.steps, seconds, ranks, mfu)


def estimated_step(config: RunConfig, stage: Stage, ranks: int, nodes: int, chip: Device) -> float:
    """Seconds of one optimizer step of a stage on that many ranks and nodes."""
    if stage == Stage.LM:
        data_parallel = max(1, ranks // config.require_lm().parallel.model_parallel)
        return step_time(config, data_parallel, chip, max(1, ranks // nodes)).total
    return autoencoder_step_seconds(config, ranks, chip, max(1, ranks // nodes))
