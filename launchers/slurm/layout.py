"""How many nodes and tasks each stage of a run takes on a cluster; impossible layouts name the nearest possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.cluster import ClusterConfig, StageResources
from calm_scale.config.lm import LMStage
from calm_scale.config.quantities import counted
from calm_scale.config.run_folder import Stage


@dataclass(frozen=True)
class StageShape:
    """Resources of one job: ``nodes`` × ``tasks_per_node`` tasks, one GPU per task where ``gpus_per_node`` > 0.

    ``note``: what of the profile was not followed, and why; empty where all of it was.
    """

    stage: Stage
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    time: str
    memory: str | None
    note: str = ""

    @property
    def num_tasks(self) -> int:
        """World size of the stage."""
        return self.nodes * self.tasks_per_node


def shape_of(config: RunConfig, cluster: ClusterConfig, stage: Stage) -> StageShape:
    """The job of a stage.

    Raises:
        ConfigError: the layout does not fit the cluster or the batch; names the nearest that does.
    """
    resources: StageResources = getattr(cluster.stages, stage)
    gpus = 0 if stage == Stage.PREP else cluster.gpus_per_node
    nodes, tasks = _counts(config, cluster, stage, resources)
    if gpus and tasks > gpus:
        raise ConfigError(
            f"{stage}: {tasks} tasks a node, but {cluster.name} has {gpus} GPUs a node: at most one task per GPU"
        )
    cpus = resources.cpus_per_task or max(1, cluster.cpus_per_node // (max(tasks, gpus) if gpus else tasks))
    if cpus * tasks > cluster.cpus_per_node:
        raise ConfigError(
            f"{stage}: {tasks} tasks × {cpus} CPUs do not fit the {cluster.cpus_per_node} CPUs of a "
            f"{cluster.name} node; at most {cluster.cpus_per_node // cpus} tasks a node, or "
            f"cpus_per_task {max(1, cluster.cpus_per_node // tasks)}"
        )
    return StageShape(
        stage=stage,
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=cpus,
        gpus_per_node=min(tasks, gpus),
        time=resources.time or cluster.max_time,
        memory=resources.memory_per_node or cluster.memory_per_node,
        note=_note(stage, nodes, tasks, resources),
    )


def _note(stage: Stage, nodes: int, tasks: int, resources: StageResources) -> str:
    if resources.nodes in (None, nodes):
        return ""
    return (
        f"{stage}: {counted(nodes, 'node')} × {counted(tasks, 'task')}, as the run's layout of {nodes * tasks} ranks "
        f"says; stages.{stage}.nodes: {resources.nodes} of the profile is not followed"
    )


def _counts(
    config: RunConfig, cluster: ClusterConfig, stage: Stage, resources: StageResources
) -> tuple[int, int]:
    if stage == Stage.PREP:
        return resources.nodes or 1, resources.tasks_per_node or cluster.cpus_per_node
    if stage == Stage.EVAL:
        return _evaluators(config, cluster, resources)
    section = config.require_stage(stage)
    nodes, tasks = _placed(section.num_ranks, section.replica_ranks, cluster, stage, resources)
    _check_layout(config, stage, nodes * tasks)
    tensor = section.parallel.tensor if isinstance(section, LMStage) else 1
    if cluster.gpus_per_node and nodes > 1 and tasks % tensor:
        fits = [size for size in range(1, tasks + 1) if tasks % size == 0]
        raise ConfigError(
            f"lm: tensor parallel {tensor} would span nodes of {tasks} GPUs; sizes that stay inside one: "
            f"{', '.join(map(str, fits))}"
        )
    return nodes, tasks


def _evaluators(config: RunConfig, cluster: ClusterConfig, resources: StageResources) -> tuple[int, int]:
    """Nodes and tasks a node of an evaluation: by default the ranks of one model, which stay inside a node.

    Raises:
        ConfigError: the model does not split so, or a node's tasks do not hold whole models.
    """
    tensor = config.evaluation.tensor_parallel
    config.require_lm().for_inference(tensor)
    nodes, tasks = resources.nodes or 1, resources.tasks_per_node or tensor
    if tasks % tensor:
        raise ConfigError(
            f"eval: {tasks} tasks a node cannot hold whole models of evaluation.tensor_parallel {tensor} ranks; set "
            f"stages.eval.tasks_per_node of {cluster.name} to a multiple of {tensor}"
        )
    return nodes, tasks


def _placed(
    world: int | None, replica: int, cluster: ClusterConfig, stage: Stage, resources: StageResources
) -> tuple[int, int]:
    """Spread a world evenly over nodes: as few as hold it where a node's size is known, else as the profile says."""
    per_node = resources.tasks_per_node or cluster.gpus_per_node or None
    if world is None:  # the data-parallel size follows from what the profile gives; at least one replica
        nodes = resources.nodes or 1
        return nodes, per_node or -(-replica // nodes)
    nodes = -(-world // per_node) if per_node else resources.nodes or 1
    tasks, rest = divmod(world, nodes)
    if rest or tasks == 0 or (per_node and tasks > per_node):
        limit = per_node or tasks + 1
        low = max(1, min(tasks, limit)) * nodes
        high = min(tasks + 1, limit) * nodes
        near = sorted({low, high} if low != high else {low, limit * -(-world // limit)})
        raise ConfigError(
            f"{stage}: {world} ranks do not spread evenly over {counted(nodes, 'node')} of {limit} on {cluster.name}; "
            f"the nearest world sizes are {' and '.join(map(str, near))}: change the data-parallel size, "
            f"or stages.{stage}.{'tasks_per_node' if per_node else 'nodes'} in the profile"
        )
    return nodes, tasks


def _check_layout(config: RunConfig, stage: Stage, world: int) -> None:
    section = config.require_stage(stage)
    replica = section.replica_ranks
    if world % replica:
        low, parallel = max(1, world // replica) * replica, config.require_lm().parallel
        raise ConfigError(
            f"lm: {world} ranks do not hold whole replicas of tensor {parallel.tensor} × pipeline "
            f"{parallel.pipeline} = {replica}; the nearest world sizes are {low} and {low + replica}"
        )
    try:
        section.micro_batches(world // replica)
    except ValueError as error:
        raise ConfigError(f"{stage}: {error}") from None


def common_shape(configs: Sequence[RunConfig], cluster: ClusterConfig, stage: Stage) -> StageShape:
    """The one job that serves a stage of all these runs.

    Raises:
        ConfigError: they need different layouts, or as ``shape_of``.
    """
    shapes = {shape_of(config, cluster, stage) for config in configs}
    if len(shapes) > 1:
        worlds = ", ".join(sorted(str(shape.num_tasks) for shape in shapes))
        raise ConfigError(
            f"sweep: stage {stage} needs different layouts ({worlds} ranks); submit the runs one by one"
        )
    return shapes.pop()
