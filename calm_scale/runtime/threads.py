"""How many CPU threads a rank may use.

Two ranks with two OpenMP threads each on two cores were seen ten times slower than with one each: the pools
spin against each other. So the number comes from the cores that a rank really has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from launchers.cores import cores_per_rank


def threads_per_rank(local_world_size: int, env: Mapping[str, str] | None = None) -> int:
    """Threads for one of ``local_world_size`` ranks on this node: its cores, or ``OMP_NUM_THREADS`` if fewer."""
    env = os.environ if env is None else env
    cores = cores_per_rank(local_world_size, env)
    asked = env.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) > 0 else cores
