"""What a job, a rank or a call to SLURM inherits of what schedulers and launchers export: a list of what passes.

Outside of their namespaces the environment is the user's and passes as it is. Inside, only the variables that name
the cluster do: an allocation around us (``SLURM_CPU_BIND``, ``SLURM_MEM_PER_CPU``), a user's preferences for the
clients (``SLURM_TIME_FORMAT``, ``SQUEUE_FORMAT``, ``SBATCH_PARTITION``) or another run's ranks would change what the
call means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""They name the cluster, or who asks."""
CLIENT_NAMESPACES = (
    "SLURM",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SPRIO_",
    "SQUEUE_",
    "SRUN_",
)
"""Prefixes of what SLURM's clients read and what its jobs are told."""
RANK_NAMESPACES = (
    "CROSS_",
    "GROUP_",
    "HYDI_",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_",
    "PMIX_",
    "PMI_",
    "RANK",
    "ROLE_",
    "TORCHELASTIC_",
    "WORLD_SIZE",
    "CALM_SCALE_ATTEMPT",
    "CALM_SCALE_LAUNCHER",
    "CALM_SCALE_FAILURES",
    "CALM_SCALE_GPUS",
)
"""Prefixes of what tells a process which rank of which world it is."""


def client_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a call to SLURM, and so of the job that ``sbatch`` queues; default: from this process's."""
    env = os.environ if env is None else env
    return {
        name: value
        for name, value in env.items()
        if name in CLUSTER_VARIABLES or not name.startswith((*CLIENT_NAMESPACES, *RANK_NAMESPACES))
    }
