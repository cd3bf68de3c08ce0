"""How many cores a process may really use: affinity and cgroup quota, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_cores() -> int:
    """Cores this process may use, at least 1: its affinity mask, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(cores, round(quota)) if quota else cores)


def cores_per_rank(local_world_size: int, env: Mapping[str, str] | None = None) -> int:
    """Cores one rank may use, at least 1.

    Two ranks with two OpenMP threads each on two cores run up to ten times slower than with one each.
    ``SLURM_CPUS_PER_TASK`` is this task's own share already; without it the node's cores are divided.
    """
    source = os.environ if env is None else env
    cores = available_cores()
    own = source.get("SLURM_CPUS_PER_TASK", "")
    if own.isdigit() and int(own) > 0 and "SLURM_STEP_ID" in source:
        return max(1, min(int(own), cores))
    return max(1, cores // max(1, local_world_size))


def _quota() -> float | None:
    try:
        limit, period = _CGROUP_V2.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us, period_us = (int(path.read_text()) for path in _CGROUP_V1)
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None
