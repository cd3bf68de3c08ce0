"""`train-ae --dry-run` and `train-lm --dry-run`: what would run, how much of it, and does it fit. No torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calm_scale.accounting import hardware, memory, saves
from calm_scale.accounting.costs import run_totals
from calm_scale.accounting.layout import balance
from calm_scale.accounting.report.document import bytes_text, flops_text
from calm_scale.config import RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.config.training import TrainingConfig
from calm_scale.stages.launch import Stage, autoencoder_section, default_ranks, lm_section
from calm_scale.stages.splits import open_split
from data_prep.manifest import MANIFEST_NAME

ASSUMED_MFU = 0.4
"""The utilisation a plan assumes before anything was measured."""


def dry_run(config: RunConfig, stage: Stage, num_ranks: int | None = None) -> int:
    """Check the configuration (and the data where it is prepared) and print the plan of one stage."""
    Console().print(stage_plan(config, stage, num_ranks or default_ranks(config, stage), gpu=None))
    return EXIT_OK


def stage_plan(config: RunConfig, stage: Stage, ranks: int, gpu: str | None, nodes: int = 1) -> Table:
    """What one training stage would do on that many ranks.

    Args:
        gpu: a key of the hardware table, for hours, saves and whether it fits; None where the device is not known.
        nodes: over which the ranks are spread.

    Raises:
        ConfigError: the layout or the batch does not fit the ranks.
    """
    rows = _autoencoder(config, ranks) if stage == "autoencoder" else _language_model(config, ranks)
    chip = hardware.device(gpu) if gpu is not None else None
    rows += _saves(config, stage, saves.interval_text(config, stage, ranks=ranks, nodes=nodes, chip=chip))
    if chip is not None:
        rows += _on_device(config, stage, ranks, chip)
    table = Table(title=f"{stage} of run {config.name}", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _on_device(config: RunConfig, stage: Stage, ranks: int, chip: hardware.Device) -> list[tuple[str, str]]:
    totals = run_totals(config) if config.lm is not None else None
    flops = 0.0 if totals is None else totals.autoencoder if stage == "autoencoder" else totals.lm
    hours = flops / (chip.peak * ranks * ASSUMED_MFU) / 3600
    return [
        (f"time at {ASSUMED_MFU:.0%} MFU on {chip.key}", f"{hours:,.1f} h, {hours * ranks:,.0f} GPU-hours"),
        ("memory of the device", bytes_text(chip.memory)),
    ]


def _autoencoder(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    stage = autoencoder_section(config)
    need = memory.autoencoder(config, ranks)
    return [
        ("layout", f"{ranks} ranks, ZeRO stage {stage.zero.stage}"),
        *_work(config, stage.training, stage.patches * config.patch_size, ranks, stage.split),
        ("memory per rank", bytes_text(need.total)),
    ]


def _language_model(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    stage = lm_section(config)
    parallel = stage.parallel
    data = parallel.data_parallel(ranks)
    micro_batches = stage.training.accumulation(data)
    stages = memory.language_model(config, data)
    fullest = memory.fullest(stages)
    return [
        ("layout", f"{ranks} ranks: tensor {parallel.tensor} × pipeline {parallel.pipeline} × data {data}"),
        ("layers by stage", " + ".join(str(layers) for layers in balance(config))),
        ("micro-batches a step", str(micro_batches)),
        *_work(config, stage.training, stage.backbone.positions * config.patch_size, data, "train"),
        ("training FLOPs", flops_text(run_totals(config).lm)),
        ("memory, fullest rank", f"{bytes_text(fullest.total)} (pipeline stage {fullest.stage})"),
    ]


def _saves(config: RunConfig, stage: Stage, interval: str) -> list[tuple[str, str]]:
    size, kept = saves.checkpoint_bytes(config, stage), saves.checkpoints_kept(config, stage)
    return [
        ("checkpoint", f"{bytes_text(size)} {interval}"),
        ("disk for checkpoints", f"{bytes_text(kept * size)} ({kept} of them)"),
    ]


def _work(
    config: RunConfig, training: TrainingConfig, tokens_per_sample: int, data: int, split: str
) -> list[tuple[str, str]]:
    training.accumulation(data)
    needed = training.steps * training.global_batch
    rows = [
        ("steps", f"{training.steps:,} of {training.global_batch} × {tokens_per_sample} tokens"),
        ("tokens", f"{needed * tokens_per_sample:,}"),
    ]
    if (config.data_dir / split / MANIFEST_NAME).is_file():
        dataset = open_split(config, split, tokens_per_sample)
        epochs = needed / max(len(dataset), 1)
        rows.append(("data", f"{len(dataset) * tokens_per_sample:,} tokens prepared: {epochs:.2f} epochs"))
    else:
        rows.append(("data", f"not prepared yet ({config.data_dir / split})"))
    return rows
