"""Step time from a device's peak, its links and one stated efficiency: an estimate to rank layouts by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from calm_scale.accounting.activations import FP32, element
from calm_scale.accounting.backbone_model import input_components, layer_components, lm_of
from calm_scale.accounting.communication import Group, Traffic, language_model, wire_bytes
from calm_scale.accounting.components import FLOPS_PER_MAC, Component, causal
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.model import (
    head_components,
    input_encoder,
    loss_components,
    recomputed,
    target_encoder,
)
from calm_scale.accounting.sharding import StageParameters, stage_parameters
from calm_scale.config.run import RunConfig

EFFICIENCY = 0.5
"""Share of the dense peak that the matrix products of one rank reach by themselves."""

ASSUMPTIONS = (
    "Matrix products (hardware FLOPs, attention causal as the kernels compute it) run at {efficiency:.0%} of the dense "
    "peak. Tensor-parallel collectives and pipeline transfers are not hidden behind computation; the data-parallel "
    "gradient reduction hides behind the last micro-batch's backward pass, the gathering of weights does not. "
    "Links: {link:.0f} GB/s inside a node, {network:.0f} GB/s per device between nodes, each per direction."
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step and what they are made of.

    Attributes:
        compute: matrix products of the heaviest stage, all micro-batches.
        tensor: its tensor-parallel collectives.
        pipeline: its transfers to neighbouring stages.
        bubble: filling and draining the pipeline.
        data: what remains visible of gradient reduction and weight gathering.
        optimizer: reading and writing the optimizer state.
    """

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """One step."""
        return self.compute + self.tensor + self.pipeline + self.bubble + self.data + self.optimizer


def step_time(
    config: RunConfig,
    data_parallel: int,
    device: Device,
    gpus_per_node: int,
    efficiency: float = EFFICIENCY,
) -> StepTime:
    """Estimated time of one step of the language model; bounded by its slowest stage."""
    lm = lm_of(config)
    parallel, passes = lm.parallel, lm.training.accumulation(data_parallel)
    held, traffic = stage_parameters(config), language_model(config, data_parallel)
    bandwidth = _bandwidths(config, data_parallel, device, gpus_per_node)
    rate = device.peak * efficiency * parallel.tensor
    positions = lm.backbone.positions * lm.training.micro_batch * passes
    compute = [FLOPS_PER_MAC * macs * positions / rate for macs in _stage_macs(config, held)]
    tensor = [wire_bytes(items, "tensor") / bandwidth["tensor"] for items in traffic]
    pipeline = [wire_bytes(items, "pipeline") / bandwidth["pipeline"] for items in traffic]
    busy = [sum(parts) for parts in zip(compute, tensor, pipeline, strict=True)]
    slowest = busy.index(max(busy))
    fill = (parallel.pipeline - 1) / (parallel.virtual_pipeline * passes)
    return StepTime(
        compute=compute[slowest],
        tensor=tensor[slowest],
        pipeline=pipeline[slowest],
        bubble=busy[slowest] * fill,
        data=max(
            _data_seconds(items, bandwidth["data"], hidden=seconds * 2 / 3 / passes)
            for items, seconds in zip(traffic, compute, strict=True)
        ),
        optimizer=max(_optimizer_bytes(config, stage, data_parallel) for stage in held) / device.bandwidth,
    )


def assumptions(device: Device, efficiency: float) -> str:
    """What the estimate rests on, in words."""
    return ASSUMPTIONS.format(efficiency=efficiency, link=device.link / 1e9, network=device.network / 1e9)


def _stage_macs(config: RunConfig, held: Sequence[StageParameters]) -> list[float]:
    """Hardware MACs per position of every stage, attention causal."""
    lm = lm_of(config)
    layer = _work(config, layer_components(lm.backbone, 0))
    macs = [float(sum(stage.layers) * layer) for stage in held]
    macs[0] += _work(config, [*input_components(config), *input_encoder(config)])
    macs[-1] += _work(config, [*head_components(config), *loss_components(config), *target_encoder(config)])
    return macs


def _work(config: RunConfig, components: Iterable[Component]) -> int:
    lm = lm_of(config)
    mode = lm.parallel.recompute
    return sum(c.training + recomputed(c, mode) for c in causal(components, lm.backbone.positions))


def _bandwidths(
    config: RunConfig, data_parallel: int, device: Device, gpus_per_node: int
) -> dict[Group, float]:
    """Bytes/s of each group. Ranks are laid out tensor first, then data, then pipeline."""
    parallel = lm_of(config).parallel
    inside = parallel.tensor * data_parallel
    world = inside * parallel.pipeline
    return {
        "tensor": device.link if parallel.tensor <= gpus_per_node else device.network,
        "data": device.link if inside <= gpus_per_node else device.network,
        "pipeline": device.link if world <= gpus_per_node else device.network,
    }


def _data_seconds(traffic: Sequence[Traffic], bandwidth: float, hidden: float) -> float:
    reduce = sum(t.wire for t in traffic if t.group == "data" and t.operation != "all_gather")
    gather = sum(t.wire for t in traffic if t.group == "data" and t.operation == "all_gather")
    return max(0.0, reduce / bandwidth - hidden) + gather / bandwidth


def _optimizer_bytes(config: RunConfig, stage: StageParameters, data_parallel: int) -> float:
    """Gradient read, master weights and two moments read and written, weights written."""
    lm = lm_of(config)
    sharded = data_parallel if lm.parallel.distributed_optimizer else 1
    return stage.trained * (FP32 + 3 * 2 * FP32 + element(lm)) / sharded
