"""How many ranks a stage needs, and starting them on this machine when no launcher has."""

from __future__ import annotations

import os
import sys
from typing import Literal

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.lm import LMStage
from launchers.local import launch

Stage = Literal["autoencoder", "lm"]
_LAUNCHER_VARIABLES = ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def autoencoder_section(config: RunConfig) -> AutoencoderStage:
    """The autoencoder section, or an error that says it is missing."""
    if config.autoencoder is None:
        raise ConfigError(
            f"run {config.name}: there is no `autoencoder` section; extend configs/autoencoder/k4.yaml"
        )
    return config.autoencoder


def lm_section(config: RunConfig) -> LMStage:
    """The language-model section, or an error that says it is missing."""
    if config.lm is None:
        raise ConfigError(f"run {config.name}: there is no `lm` section; extend configs/lm/calm-m.yaml")
    return config.lm


def default_ranks(config: RunConfig, stage: Stage) -> int:
    """Ranks the layout names: DP for the autoencoder, TP × PP × DP for the language model."""
    if stage == "autoencoder":
        return autoencoder_section(config).zero.data or 1
    parallel = lm_section(config).parallel
    return parallel.model_parallel * (parallel.data or 1)


def under_a_launcher() -> bool:
    """True when torchrun, srun, mpirun or our own launcher has already started this process as one of many."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def spawn_if_needed(num_ranks: int) -> int | None:
    """Start this same command ``num_ranks`` times on this machine and wait; the exit code of the whole.

    Returns:
        None when this process should do the work itself: it is a rank already, or one rank is enough.
    """
    if under_a_launcher() or num_ranks == 1:
        return None
    return launch([sys.executable, "-m", "calm_scale", *sys.argv[1:]], num_ranks)
