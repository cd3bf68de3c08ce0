"""How many ranks a stage needs, and starting them on this machine when no launcher has."""

from __future__ import annotations

import sys

from calm_scale.config import RunConfig
from calm_scale.config.run_folder import Stage
from launchers.environment import facts
from launchers.local import launch


def default_ranks(config: RunConfig, stage: Stage) -> int:
    """Ranks the layout names: DP for the autoencoder, TP × PP × DP for the language model."""
    section = config.require_stage(stage)
    return section.num_ranks or section.replica_ranks


def spawn_if_needed(num_ranks: int) -> int | None:
    """Start this same command ``num_ranks`` times on this machine and wait; the exit code of the whole.

    Returns:
        None when this process should do the work itself: one rank is enough, or srun, mpirun, torchrun or our own
        launcher has started it as one of many. A single task of srun (an interactive shell, say) is alone.
    """
    me = facts()
    alone = me.launcher == "none" or (me.launcher == "slurm" and me.world_size == 1)
    if num_ranks == 1 or not alone:
        return None
    return launch(this_program(*sys.argv[1:]), num_ranks, ends_process=True)


def this_program(*arguments: str) -> list[str]:
    """The command line of one calm-scale command with this interpreter, which looks for modules where they are
    installed and not (``-P``) in the user's folder: a ``tty.py`` there would hide the library's."""
    return [sys.executable, "-P", "-m", "calm_scale", *arguments]
