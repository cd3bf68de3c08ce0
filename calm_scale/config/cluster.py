"""A SLURM cluster profile: what a site needs in its job scripts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calm_scale.config.base import Section


class ContainerConfig(Section):
    """A container runtime for the job steps."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = ()


class ClusterConfig(Section):
    """Everything site-specific; nothing of it appears in code or templates."""

    name: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = Field(default=0, ge=0)
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gpus-per-node"
    gpu_type: str | None = None
    cpus_per_node: int = Field(gt=0)
    memory_per_node: str | None = None
    max_time: str = "24:00:00"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: ContainerConfig | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    network_interface: str | None = None
    mpi: Literal["pmix", "mpirun"] = "pmix"
    extra_directives: tuple[str, ...] = ()
