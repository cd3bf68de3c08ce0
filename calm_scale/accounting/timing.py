"""Step time of a stage: kernels, collectives and the schedule put together, to rank layouts by.

The constants behind it are fitted to published runs and tested on others (docs/scale.md, benchmarks/plan_accuracy.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from calm_scale.accounting.activations import FP32, element
from calm_scale.accounting.autoencoder_model import autoencoder_components
from calm_scale.accounting.backbone_model import (
    backbone_components,
    input_components,
    layer_components,
    lm_of,
)
from calm_scale.accounting.communication import Traffic, autoencoder, language_model
from calm_scale.accounting.components import Component, parameters_of
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.kernels import (
    KernelSeconds,
    Rates,
    autoencoder_seconds,
    micro_batch_seconds,
    rates,
)
from calm_scale.accounting.links import Ring, collective_seconds, ring, rings
from calm_scale.accounting.model import head_components, input_encoder, loss_components, target_encoder
from calm_scale.accounting.sharding import StageParameters, stage_parameters
from calm_scale.accounting.software import OURS, Software
from calm_scale.config.errors import ConfigError
from calm_scale.config.run import RunConfig

UPDATE_BYTES = FP32 + 3 * 2 * FP32
"""Per parameter of an AdamW step: the gradient read, fp32 weights and two moments read and written."""

BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's time; the rest is its forward pass."""

ASSUMPTIONS = (
    "{software}: matrix products run at {products:.0%} of the dense peak plus their operands over the memory, "
    "attention (causal) at {attention:.0%}; norms, activations, losses, gradients and the optimizer move their "
    "bytes. Collectives run at the bandwidth of the ports their ranks share: {link:.0f} GB/s inside a node, "
    "{network:.0f} GB/s per device between nodes, each per direction. The reduction of gradients hides behind the "
    "last micro-batch's backward pass; tensor-parallel collectives, transfers between stages and the gathering of "
    "weights do not. "
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
    efficiency: float | None = None,
    software: Software = OURS,
) -> StepTime:
    """Estimated time of one step of the language model; bounded by its slowest stage.

    Args:
        efficiency: share of the peak that large matrix products reach; the device's own where it is None.
    """
    lm, software = lm_of(config), software.for_run(config)
    parallel, passes = lm.parallel, lm.training.accumulation(data_parallel)
    held, traffic = stage_parameters(config), language_model(config, data_parallel)
    over = rings(parallel.tensor, data_parallel, parallel.pipeline, device, gpus_per_node)
    at = rates(device, software, efficiency)
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


def autoencoder_step_seconds(
    config: RunConfig, world_size: int, device: Device, gpus_per_node: int, software: Software = OURS
) -> float:
    """Estimated seconds of one step of the autoencoder: kernels, fp32 collectives that nothing hides, the update."""
    stage = config.autoencoder
    if stage is None:
        raise ConfigError(f"run '{config.name}' has no `autoencoder` section: nothing to train")
    at = rates(device, software)
    kernels = autoencoder_seconds(config, stage, at).times(stage.training.accumulation(world_size))
    traffic = autoencoder(config, world_size)
    over = ring(world_size, 1, device, gpus_per_node)
    trained = parameters_of(autoencoder_components(config))
    update = UPDATE_BYTES * trained / (world_size if stage.zero.stage else 1) / at.memory
    return kernels.total + collective_seconds(traffic, "data", over) + update + software.step_seconds


def assumptions(device: Device, efficiency: float | None, software: Software = OURS) -> str:
    """What the estimate rests on, in words."""
    at = rates(device, software, efficiency)
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
    layer = micro_batch_seconds(config, list(layer_components(lm_of(config).backbone, 0)), at)
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
    lm = lm_of(config)
    sharded = data_parallel if lm.parallel.distributed_optimizer else 1
    return stage.trained * ((UPDATE_BYTES + element(lm)) / sharded + 2 * FP32)
