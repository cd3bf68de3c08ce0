"""Layouts of a language model on a number of nodes, ranked: what fits, how fast it is, which one to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from calm_scale.accounting import memory
from calm_scale.accounting.costs import step_flops, tokens_per_step
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.memory import Memory
from calm_scale.accounting.placement import PipelineBound, balance, pipeline_bound
from calm_scale.accounting.step_time import StepTime, step_time
from calm_scale.config.errors import ConfigError
from calm_scale.config.run import RunConfig

USABLE_MEMORY = 0.9
"""Share of the device's memory a plan may fill; the rest is for the runtime, kernels and fragmentation."""

MAX_TENSOR = 8
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """One way to lay the run out, and what it would do.

    Attributes:
        config: the run with this layout set.
        data_parallel: replicas.
        layers: layers of each pipeline chunk.
        fullest: memory of the fullest stage.
        limit: bytes a rank may use.
        time: one optimizer step.
        bound: imbalance and bubble of the pipeline.
        tokens_per_second: of the whole job.
        mfu: model FLOPs over the dense peak, by this estimate.
        days: of the whole training.
        dollars: at the device table's assumed price.
    """

    config: RunConfig
    data_parallel: int
    layers: tuple[int, ...]
    fullest: Memory
    limit: float
    time: StepTime
    bound: PipelineBound
    tokens_per_second: float
    mfu: float
    days: float
    dollars: float

    @property
    def fits(self) -> bool:
        """Whether the fullest stage stays below the limit."""
        return self.fullest.total <= self.limit

    @property
    def overrides(self) -> list[str]:
        """The ``--set`` values that select this layout."""
        lm = self.config.require_lm()
        parallel = lm.parallel
        return [
            f"lm.parallel.tensor={parallel.tensor}",
            f"lm.parallel.pipeline={parallel.pipeline}",
            f"lm.parallel.virtual_pipeline={parallel.virtual_pipeline}",
            f"lm.parallel.data={self.data_parallel}",
            f"lm.parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}",
            f"lm.parallel.recompute={parallel.recompute}",
            "lm.parallel.pipeline_layout=auto",
            f"lm.training.micro_batch={lm.training.micro_batch}",
        ]


def rank(config: RunConfig, nodes: int, chip: Device, *, gpus_per_node: int = 8) -> list[Layout]:
    """Every legal layout, those that fit first, the fastest first. The first one is the plan's choice.

    Recomputation is turned on only where a layout does not fit without it.

    Raises:
        ConfigError: no layout divides the batch, the heads and the layers over that many ranks.
    """
    world, work = nodes * gpus_per_node, step_flops(config)
    found = []
    for candidate, data_parallel in _candidates(config, world, gpus_per_node):
        layout = _evaluate(candidate, data_parallel, chip, gpus_per_node, work)
        if not layout.fits:
            recomputing = _with(candidate, parallel={"recompute": "full"})
            layout = _evaluate(recomputing, data_parallel, chip, gpus_per_node, work)
        found.append(layout)
    if not found:
        lm = config.require_lm()
        raise ConfigError(
            f"no layout fits {nodes} × {gpus_per_node} GPUs: lm.training.global_batch {lm.training.global_batch} must "
            f"be a multiple of the data-parallel size, and {lm.backbone.num_heads} heads and "
            f"{lm.backbone.num_layers} layers must divide; change the number of nodes or the global batch"
        )
    return sorted(found, key=lambda layout: (not layout.fits, layout.time.total))


def _candidates(config: RunConfig, world: int, gpus_per_node: int) -> Iterator[tuple[RunConfig, int]]:
    """Every layout the configuration admits, without recomputation."""
    lm = config.require_lm()
    for tensor in _divisors(min(MAX_TENSOR, gpus_per_node, world)):
        if any(count % tensor for count in _divided_by_tensor(config)) or world % tensor:
            continue
        for pipeline in _divisors(world // tensor):
            data = world // tensor // pipeline
            if pipeline > lm.backbone.num_layers or lm.training.global_batch % data:
                continue
            for micro_batch in MICRO_BATCHES:
                passes, rest = divmod(lm.training.global_batch, data * micro_batch)
                if rest:
                    continue
                for virtual in _virtual_sizes(lm.backbone.num_layers, pipeline, passes):
                    parallel = {
                        "tensor": tensor,
                        "pipeline": pipeline,
                        "virtual_pipeline": virtual,
                        "data": data,
                        "sequence_parallel": tensor > 1,
                        "distributed_optimizer": True,
                        "recompute": "none",
                        "pipeline_layout": "auto",
                    }
                    yield _with(config, parallel=parallel, training={"micro_batch": micro_batch}), data


def _evaluate(
    config: RunConfig,
    data_parallel: int,
    chip: Device,
    gpus_per_node: int,
    work: float,
) -> Layout:
    """``work``: model FLOPs of a step, which no layout changes."""
    lm = config.require_lm()
    time = step_time(config, data_parallel, chip, gpus_per_node)
    world = lm.parallel.model_parallel * data_parallel
    seconds = lm.training.steps * time.total
    return Layout(
        config=config,
        data_parallel=data_parallel,
        layers=balance(config),
        fullest=memory.fullest(memory.language_model(config, data_parallel)),
        limit=USABLE_MEMORY * chip.memory,
        time=time,
        bound=pipeline_bound(config, lm.training.accumulation(data_parallel)),
        tokens_per_second=tokens_per_step(config) / time.total,
        mfu=work / (world * chip.peak * time.total),
        days=seconds / 86400,
        dollars=world * seconds / 3600 * chip.dollars_per_hour,
    )


def _with(config: RunConfig, **sections: dict[str, object]) -> RunConfig:
    """The run with fields of ``lm.parallel`` and ``lm.training`` replaced; legality is the caller's."""
    lm = config.require_lm()
    updated = {name: getattr(lm, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update={"lm": lm.model_copy(update=updated)})


def _divided_by_tensor(config: RunConfig) -> tuple[int, ...]:
    backbone = config.require_lm().backbone
    return (
        backbone.num_heads,
        backbone.query_groups,
        backbone.ffn_size,
        backbone.hidden_size,
        backbone.positions,
    )


def _virtual_sizes(num_layers: int, pipeline: int, passes: int) -> list[int]:
    """1, and 2 or 4 chunks a rank where there are layers and a fitting number of micro-batches."""
    if pipeline == 1:
        return [1]
    return [v for v in (1, 2, 4) if v == 1 or (pipeline * v <= num_layers and passes % pipeline == 0)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
