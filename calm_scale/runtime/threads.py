"""How many CPU threads a rank may use.

Two ranks with two OpenMP threads each on two cores were seen ten times slower than with one each: the pools
spin against each other. So the number comes from the cores that a rank really has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def cores_of_this_process() -> int:
    """Cores the scheduler lets this process run on."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(
    local_world_size: int, env: Mapping[str, str] | None = None, cores: int | None = None
) -> int:
    """Threads for one of ``local_world_size`` ranks on this node.

    ``OMP_NUM_THREADS`` wins where someone set it; then ``SLURM_CPUS_PER_TASK``; then an equal share of the
    cores this process may run on.
    """
    env = os.environ if env is None else env
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        value = env.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    available = cores_of_this_process() if cores is None else cores
    return max(1, available // max(1, local_world_size))
