"""A SLURM cluster profile: what a site needs in its job scripts, and its container."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from calm_scale.config.section import Line, LinePath, NodePathText, Section, one_line

Runtime = Literal["pyxis", "apptainer"]
_FORM = "write SOURCE:TARGET or SOURCE:TARGET:FLAGS with absolute paths, such as /shared/data:/shared/data:ro"
_WITHOUT_SOURCE = ("tmpfs", "umount")
"""What pyxis takes in place of a source: nothing of the machine is seen at the target."""


@dataclass(frozen=True)
class Mount:
    """``source`` on the machine is seen as ``target`` in the container; None: something else is seen there."""

    source: Path | None
    target: Path


class ContainerConfig(Section):
    """A container runtime for the job steps."""

    runtime: Runtime
    """The program that starts the container."""
    image: LinePath
    """The image, as the runtime names it."""
    mounts: tuple[LinePath, ...] = ()
    """`SOURCE:TARGET[:FLAGS]` each; the folder of the submission and the run folders are mounted anyway."""

    @model_validator(mode="after")
    def _readable(self) -> ContainerConfig:
        for text in self.mounts:
            read_mount(text, self.runtime)
        return self


def read_mount(text: str, runtime: Runtime) -> Mount:
    """A mount as the runtime reads it.

    Raises:
        ValueError: the runtime would read something else, or nothing.
    """
    parts = text.split(":")
    source, target = parts[0], parts[1] if len(parts) > 1 else parts[0]
    bare = runtime == "pyxis" and source in _WITHOUT_SOURCE
    if len(parts) > 3 or not target.startswith("/") or not (bare or source.startswith("/")):
        raise ValueError(f"mount {text!r}: {_FORM}")
    if Path(target) == Path("/"):
        raise ValueError(f"mount {text!r}: nothing can be mounted over the container's root; {_FORM}")
    if found := unmountable(text, runtime):
        raise ValueError(f"mount {text!r}: {runtime} cannot mount a path with {found}; {_FORM}")
    return Mount(None if bare else Path(source), Path(target))


def unmountable(path: str, runtime: Runtime) -> str:
    """The characters of a path that the runtime takes for something else, between spaces; empty when there are none."""
    # pyxis hands its mounts to a shell and from there to a table of words
    unsafe = ', \t"$`\\' if runtime == "pyxis" else ","
    return " ".join(repr(char) for char in sorted({char for char in path if char in unsafe}))


def hidden(path: Path, mounts: Sequence[Mount]) -> Path | None:
    """What has to be mounted so that ``path`` means the same in the container; None when nothing is missing.

    That is ``path`` itself, or where a symbolic link on it leads. Of mounts on one place the last is seen.

    Args:
        path: absolute; need not exist.
    """
    covering = [mount for mount in mounts if path.is_relative_to(mount.target)]
    if not covering or covering[-1].source is None:
        return path
    source, target = covering[-1].source, covering[-1].target
    real = Path(os.path.realpath(path))
    if Path(os.path.realpath(source / path.relative_to(target))) != real:
        return path
    if real.is_relative_to(os.path.realpath(source)):
        return None
    return path if real == path else hidden(real, mounts)


_TIME = re.compile(r"(?i)\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(?i)(api_?key|secret|token|passw)")
_FROM_LAYOUT = "the run's layout and stages.STAGE.nodes, tasks_per_node and cpus_per_task decide it"
_FROM_SCRIPT = "the job script relies on its own"
_OWNED = {
    "array": "a sweep's script counts its own tasks",
    "chdir": "relative paths of the run count from the folder of the submission",
    "cpus-per-task": _FROM_LAYOUT,
    "dependency": "`submit` chains the stages",
    "error": "the logs lie in <workdir>/slurm/logs",
    "exclude": "nodes that the preflight found bad are excluded with it; use constraint or --nodelist",
    "export": "set variables under environment",
    "export-file": "set variables under environment",
    "job-name": "set the run's name",
    "kill-on-invalid-dep": _FROM_SCRIPT,
    "mem": "set memory_per_node",
    "no-kill": "a job whose node died must end to be requeued",
    "no-requeue": "a stopped job requeues itself; see requeue.max_attempts_without_progress",
    "nodes": _FROM_LAYOUT,
    "ntasks": _FROM_LAYOUT,
    "ntasks-per-core": _FROM_LAYOUT,
    "ntasks-per-gpu": _FROM_LAYOUT,
    "ntasks-per-node": _FROM_LAYOUT,
    "ntasks-per-socket": _FROM_LAYOUT,
    "open-mode": _FROM_SCRIPT,
    "output": "the logs lie in <workdir>/slurm/logs",
    "parsable": _FROM_SCRIPT,
    "requeue": _FROM_SCRIPT,
    "signal": "set requeue.notice_seconds",
    "test-only": "use `submit --dry-run`",
    "time": "set max_time or stages.STAGE.time",
    "wait": _FROM_SCRIPT,
    "wrap": _FROM_SCRIPT,
}
"""sbatch options that the job scripts set or rely on, and what to do instead."""
_SHORT = {
    "D": "chdir",
    "J": "job-name",
    "N": "nodes",
    "W": "wait",
    "a": "array",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "k": "no-kill",
    "n": "ntasks",
    "o": "output",
    "t": "time",
    "x": "exclude",
}


def _plain_number(value: object) -> object:
    """A whole number where a text belongs (minutes, a variable's value) is the text that a person writes for it."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a time limit; write days-hours:minutes:seconds (1-00:00:00), days-hours, "
            "hours:minutes:seconds, minutes:seconds, minutes, or unlimited"
        )
    return text


def _directive(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError(f"{text!r} is not an sbatch option; write it as --name=value")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not an sbatch option: {error}") from None
    for word in words:
        if (option := _owned(word)) is not None:
            raise ValueError(f"{text!r}: a profile cannot set --{option}: {_OWNED[option]}")
    return text


def _owned(word: str) -> str | None:
    """The option of the job scripts that a word sets, in its long, short or abbreviated form."""
    if word.startswith("--"):
        name = word[2:].split("=", maxsplit=1)[0]
        abbreviated = [option for option in _OWNED if option.startswith(name)] if len(name) > 1 else []
        return name if name in _OWNED else next(iter(abbreviated), None)
    return _SHORT.get(word[1:2]) if word.startswith("-") else None


VariableValue = Annotated[NodePathText, BeforeValidator(_plain_number), AfterValidator(one_line)]
Directive = Annotated[Line, AfterValidator(_directive)]
TimeLimit = Annotated[str, BeforeValidator(_plain_number), AfterValidator(_time)]


class StageResources(Section):
    """What one stage takes where the defaults do not fit."""

    nodes: int | None = Field(default=None, gt=0)
    """Nodes where the run's layout leaves them open; null follows from the layout, else 1."""
    tasks_per_node: int | None = Field(default=None, gt=0)
    """Processes of a node; null is one a GPU (prep: one a core; without GPUs: what the layout needs)."""
    cpus_per_task: int | None = Field(default=None, gt=0)
    """Cores of a process; null divides those of a node."""
    time: TimeLimit | None = None
    """Time limit of the job; null is `max_time`."""
    memory_per_node: Annotated[Line, BeforeValidator(_plain_number)] | None = None
    """Memory of a node for the job, as sbatch takes it; null is the profile's."""
    extra_directives: tuple[Directive, ...] = ()
    """More sbatch options of this stage."""


class StagesConfig(Section):
    """Resources by stage."""

    prep: StageResources = StageResources()
    """Of the preparation."""
    autoencoder: StageResources = StageResources()
    """Of the autoencoder's training."""
    lm: StageResources = StageResources()
    """Of the language model's training."""
    eval: StageResources = StageResources()
    """Of an evaluation."""


class RequeueConfig(Section):
    """When a job goes back into the queue by itself."""

    notice_seconds: int | None = Field(default=None, ge=10)
    """Seconds before the time limit at which the ranks are told; null follows from measured steps and saves."""
    max_attempts_without_progress: int = Field(default=3, ge=1)
    """Attempts in a row that crash without a new checkpoint before the job is given up."""
    max_outside_without_progress: int = Field(default=10, ge=1)
    """The same for ends that the job did not cause (dead nodes, preemption)."""
    end_others_seconds: int = Field(default=60, ge=1)
    """Seconds that the other ranks have once one has ended."""


class ClusterConfig(Section):
    """Everything site-specific; nothing of it appears in code or templates."""

    name: Line
    """The profile's name; where it is left out, the file's name."""
    partition: Line | None = None
    """The partition of the jobs."""
    account: Line | None = None
    """The account that is charged."""
    qos: Line | None = None
    """The quality of service."""
    constraint: Line | None = None
    """Features that a node must have."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a node."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gpus-per-node"
    """The sbatch option that asks for GPUs; none asks for none."""
    gpu_type: Line | None = None
    """The GPU's name in that request, where the site wants one."""
    device: Line | None = None
    """The GPU as `plan --gpu` calls it, for estimates before the run; null takes `gpu_type` where it is such a name."""
    cpus_per_node: int = Field(gt=0)
    """Cores of a node."""
    memory_per_node: Annotated[Line, BeforeValidator(_plain_number)] | None = None
    """Memory of a node for a job, as sbatch takes it."""
    max_time: TimeLimit = "24:00:00"
    """Time limit of a job."""
    python: LinePath | None = None
    """The interpreter on the nodes; null is the one that submits."""
    modules: tuple[Line, ...] = ()
    """Module files to load."""
    setup: tuple[Line, ...] = ()
    """Shell lines that run before anything else of a job, as they are written."""
    container: ContainerConfig | None = None
    """The container of the job steps."""
    environment: dict[str, VariableValue] = Field(default_factory=dict)
    """Variables set in every job; no secrets."""
    network_interface: Line | None = None
    """The interface that NCCL and gloo use."""
    mpi: Literal["pmix", "mpirun"] = "pmix"
    """How the processes of a prep are started."""
    mpirun_options: tuple[Line, ...] = ()
    """Options of mpirun."""
    extra_directives: tuple[Directive, ...] = ()
    """More sbatch options of every job."""
    stages: StagesConfig = StagesConfig()
    """Resources by stage."""
    requeue: RequeueConfig = RequeueConfig()
    """When a job goes back into the queue by itself."""
    preflight: bool = True
    """Check every node before a training."""
    link_check: bool | None = None
    """Measure all-reduce between neighbouring nodes before a training; null does where several nodes have GPUs."""
    min_free_gigabytes: float = Field(default=1.0, ge=0)
    """GB that must be free in the run's folder on every node."""
    eval_each_checkpoint: bool = False
    """Queue an evaluation of every checkpoint."""

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

    @model_validator(mode="after")
    def _starts_in_the_container(self) -> ClusterConfig:
        if self.container is not None and self.container.runtime == "pyxis" and self.mpi == "mpirun":
            raise ValueError(
                "mpi: mpirun starts its processes outside of a pyxis container; set mpi: pmix, or runtime: apptainer"
            )
        return self
