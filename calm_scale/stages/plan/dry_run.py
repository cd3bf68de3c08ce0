"""`train-ae --dry-run` and `train-lm --dry-run`: what would run, how often it saves, does it fit. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.accounting import hardware, memory, saves
from calm_scale.accounting.costs import run_totals
from calm_scale.accounting.placement import balance
from calm_scale.accounting.step_time import training_time
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.quantities import bytes_text, counted, flops_text
from calm_scale.config.run_folder import TRAINED, Stage
from calm_scale.config.training import TrainingConfig
from calm_scale.stages.before_start import problems, resume_refusals
from calm_scale.stages.launch import default_ranks
from calm_scale.stages.splits import open_training_split
from data_prep.shards.manifest import MANIFEST_NAME


def dry_run(
    config: RunConfig,
    stage: Stage,
    num_ranks: int | None = None,
    notes: Sequence[str] = (),
    accept: Sequence[str] = (),
) -> int:
    """Check the configuration (and what of its inputs is there) and print the plan of one stage, then ``notes``.

    ``accept``: changed fields with which the newest checkpoint may be resumed.

    Raises:
        ConfigError: the stage would be refused.
    """
    console = Console()
    plan = stage_plan(config, stage, num_ranks or default_ranks(config, stage), chip=None)
    if found := problems(config, (stage,)) + resume_refusals(config, (stage,), accept):
        raise ConfigError("\n".join(found))
    console.print(plan)
    print_notes(console, notes)
    return EXIT_OK


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """What is noteworthy, one line each."""
    for note in notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def stage_plan(
    config: RunConfig,
    stage: Stage,
    ranks: int,
    chip: hardware.Device | None,
    nodes: int = 1,
    unknown: str = "no step time can be estimated for this device",
) -> Table:
    """What one training stage would do on that many ranks.

    Args:
        chip: for hours, saves and whether it fits; None where the device is not known.
        nodes: over which the ranks are spread.
        unknown: what to say without a ``chip``.

    Raises:
        ConfigError: the layout or the batch does not fit the ranks.
    """
    rows = _autoencoder(config, ranks) if stage == Stage.AUTOENCODER else _language_model(config, ranks)
    interval = saves.interval_text(config, stage, ranks=ranks, nodes=nodes, chip=chip, unknown=unknown)
    rows += _saves(config, stage, interval)
    if chip is not None:
        rows += _on_device(config, stage, ranks, nodes, chip)
    return two_columns(f"{stage} of run {config.name}", rows)


def two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is known of them; a long path is folded, never cut."""
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _on_device(
    config: RunConfig, stage: Stage, ranks: int, nodes: int, chip: hardware.Device
) -> list[tuple[str, str]]:
    time = training_time(config, stage, ranks=ranks, nodes=nodes, chip=chip)
    return [
        (f"time on {chip.key}", f"{time.hours:,.1f} h, {time.device_hours:,.0f} GPU-hours ({time.reason})"),
        ("memory of the device", bytes_text(chip.memory)),
    ]


def _autoencoder(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    stage = config.require_autoencoder()
    need = memory.autoencoder(config, ranks)
    return [
        ("layout", f"{counted(ranks, 'rank')}, ZeRO stage {stage.zero.stage}"),
        *_work(config, stage.training, stage.patches * config.patch_size, ranks, stage.split),
        ("memory per rank", bytes_text(need.total)),
    ]


def _language_model(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    stage = config.require_lm()
    parallel = stage.parallel
    data = parallel.data_parallel(ranks)
    micro_batches = stage.micro_batches(data)
    stages = memory.language_model(config, data)
    fullest = memory.fullest(stages)
    return [
        (
            "layout",
            f"{counted(ranks, 'rank')}: tensor {parallel.tensor} × pipeline {parallel.pipeline} × data {data}",
        ),
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
        ("disk for checkpoints", f"{bytes_text(kept * size)} ({kept}: {saves.kept_text(config, stage)})"),
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
        dataset = open_training_split(config, split, tokens_per_sample)
        epochs = needed / max(len(dataset), 1)
        rows.append(("data", f"{len(dataset) * tokens_per_sample:,} tokens prepared: {epochs:.2f} epochs"))
    else:
        rows.append(("data", f"not prepared yet ({config.data_dir / split})"))
    return rows


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
