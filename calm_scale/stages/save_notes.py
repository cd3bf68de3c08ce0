"""What `checkpoint.interval: auto` stands for, where nothing is said of the machine. No torch."""

from __future__ import annotations

from calm_scale.accounting import hardware, saves
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.run_folder import TRAINED, Stage
from calm_scale.stages.launch import default_ranks

GPU = "h100"
GPUS_PER_NODE = 8


def save_notes(config: RunConfig) -> list[str]:
    """One line for each stage that saves at the automatic interval: the number on H100 nodes, and why.

    The layout is the configuration's; where that leaves the number of ranks open, one node is filled.
    """
    return [
        f"{stage}.training.checkpoint.interval: {_note(config, stage)}"
        for stage in TRAINED
        if config.has(stage) and config.require_stage(stage).training.checkpoint.interval == "auto"
    ]


def _note(config: RunConfig, stage: Stage) -> str:
    ranks = _ranks(config, stage)
    nodes = -(-ranks // GPUS_PER_NODE)
    try:
        text = saves.interval_text(config, stage, ranks=ranks, nodes=nodes, chip=hardware.device(GPU))
    except ConfigError as error:
        return f"not known for this layout ({error})"
    return f"on {nodes} × {GPUS_PER_NODE} {GPU} {text}; `calm-scale plan` says it for other machines"


def _ranks(config: RunConfig, stage: Stage) -> int:
    if stage == Stage.AUTOENCODER:
        named = config.autoencoder.zero.data if config.autoencoder else None
        return named or GPUS_PER_NODE
    ranks, parallel = default_ranks(config, stage), config.lm.parallel if config.lm else None
    if parallel is None or parallel.data is not None:
        return ranks
    return max(ranks, GPUS_PER_NODE // ranks * ranks)
