"""A SLURM cluster profile: what a site needs in its job scripts."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from calm_scale.config.base import Section

_TIME = re.compile(r"(\d+-)?\d{1,2}:\d{2}:\d{2}|\d+(:\d{2})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(?i)(api_?key|secret|token|passw)")


def _one_line(text: str) -> str:
    if any(ord(char) < 32 for char in text):
        raise ValueError("a value of a cluster profile is one line without control characters")
    return text


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a time limit; write days-hours:minutes:seconds, for example 1-00:00:00"
        )
    return text


Line = Annotated[str, AfterValidator(_one_line)]
TimeLimit = Annotated[str, AfterValidator(_time)]


class ContainerConfig(Section):
    """A container runtime for the job steps."""

    runtime: Literal["pyxis", "apptainer"]
    image: Line
    mounts: tuple[Line, ...] = ()


class StageResources(Section):
    """What one stage takes where the defaults do not fit.

    ``nodes`` counts where the run's layout leaves it open (a training on GPUs whose data-parallel size is set takes as
    few nodes as hold its ranks); None follows from the layout, else 1. ``tasks_per_node: None`` is one task per GPU
    (prep: one per core; without GPUs: what the layout needs). ``time: None`` is the profile's ``max_time``.
    """

    nodes: int | None = Field(default=None, gt=0)
    tasks_per_node: int | None = Field(default=None, gt=0)
    cpus_per_task: int | None = Field(default=None, gt=0)
    time: TimeLimit | None = None
    memory_per_node: Line | None = None
    extra_directives: tuple[Line, ...] = ()


class StagesConfig(Section):
    """Resources by stage."""

    prep: StageResources = StageResources()
    autoencoder: StageResources = StageResources()
    lm: StageResources = StageResources()
    eval: StageResources = StageResources()


class RequeueConfig(Section):
    """When a job goes back into the queue by itself.

    ``notice_seconds``: how long before the time limit the ranks are told; None derives it from the step and save
    times this run has measured (600 before there are any). ``max_attempts_without_progress`` bounds crashes,
    ``max_outside_without_progress`` what the job is not to blame for (dead nodes, preemption).
    ``end_others_seconds``: once a rank has ended, the others have this long.
    """

    notice_seconds: int | None = Field(default=None, ge=10)
    max_attempts_without_progress: int = Field(default=3, ge=1)
    max_outside_without_progress: int = Field(default=10, ge=1)
    end_others_seconds: int = Field(default=60, ge=1)


class ClusterConfig(Section):
    """Everything site-specific; nothing of it appears in code or templates.

    ``python``: the interpreter on the compute nodes; None takes the one that submits. ``setup``: shell lines, run
    as they stand before anything else of a job. ``gpu_type`` is part of the request where GPUs are asked for by name;
    ``device`` is the GPU as ``plan --gpu`` calls it, for hours and save intervals before the run; None takes
    ``gpu_type`` where that is such a name. ``network_interface`` is given to NCCL and gloo. ``link_check``:
    measure all-reduce between neighbouring nodes before training; None does where several nodes have GPUs.
    """

    name: Line
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    gpus_per_node: int = Field(default=0, ge=0)
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gpus-per-node"
    gpu_type: Line | None = None
    device: Line | None = None
    cpus_per_node: int = Field(gt=0)
    memory_per_node: Line | None = None
    max_time: TimeLimit = "24:00:00"
    python: Line | None = None
    modules: tuple[Line, ...] = ()
    setup: tuple[Line, ...] = ()
    container: ContainerConfig | None = None
    environment: dict[str, Line] = Field(default_factory=dict)
    network_interface: Line | None = None
    mpi: Literal["pmix", "mpirun"] = "pmix"
    mpirun_options: tuple[Line, ...] = ()
    extra_directives: tuple[Line, ...] = ()
    stages: StagesConfig = StagesConfig()
    requeue: RequeueConfig = RequeueConfig()
    preflight: bool = True
    link_check: bool | None = None
    min_free_gigabytes: float = Field(default=1.0, ge=0)
    eval_each_checkpoint: bool = False

    @field_validator("environment")
    @classmethod
    def _variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a name for an environment variable")
            if _SECRET.search(name):
                raise ValueError(
                    f"{name} looks like a secret: job scripts are files; export it in the shell that submits instead"
                )
        return environment

    @field_validator("extra_directives")
    @classmethod
    def _directives(cls, directives: tuple[str, ...]) -> tuple[str, ...]:
        for directive in directives:
            if not directive.startswith("-"):
                raise ValueError(f"{directive!r} is not an sbatch option; write it as --name=value")
        return directives
