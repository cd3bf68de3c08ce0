"""The whole run in one table before anything is queued: text, tokens, disk, hours. A disk too small is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from calm_scale.accounting import hardware, saves
from calm_scale.accounting.autoencoder_model import autoencoder_components
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.costs import run_totals
from calm_scale.accounting.report.document import bytes_text, seconds_text
from calm_scale.config import CalmScaleError, RunConfig
from calm_scale.stages.dry_run import ASSUMED_MFU
from data_prep.estimate import Estimate, estimate
from data_prep.manifest import MANIFEST_NAME, Manifest
from launchers.slurm.layout import Stage, StageShape

_TRAINED: tuple[saves.Stage, ...] = ("autoencoder", "lm")
METRICS_BYTES_PER_STEP = 600
EVALUATION_BYTES = 5_000_000


@dataclass(frozen=True)
class DiskNeed:
    """What one part of a run writes, where, and how much of it is there already."""

    label: str
    folder: Path
    bytes_in_all: float
    bytes_there: int

    @property
    def bytes_to_come(self) -> float:
        """Still to be written."""
        return max(0.0, self.bytes_in_all - self.bytes_there)


@dataclass(frozen=True)
class Text:
    """What is known of a run's inputs before they are read, or the problem that keeps it unknown."""

    estimate: Estimate | None
    problem: str = ""


def look_at_text(config: RunConfig) -> Text:
    """A look at the first documents; inputs may be visible from the compute nodes only, which is no error here."""
    if config.prep is None:
        return Text(None, "no prep section")
    try:
        return Text(estimate(config))
    except (CalmScaleError, OSError) as error:
        return Text(None, str(error))


def run_plan(
    config: RunConfig,
    shapes: dict[Stage, StageShape],
    text: Text,
    needs: Sequence[DiskNeed],
    chip: hardware.Device | None,
    num_runs: int = 1,
) -> Table:
    """Text, tokens available and needed, disk and hours of the stages in ``shapes``.

    Args:
        needs: from :func:`disk_needs`, of this run or of all runs of a sweep.
        chip: for hours; None where the device is not known.
        num_runs: of a sweep; hours are those of one of them.
    """
    several = f": one of {num_runs} runs, disk of all" if num_runs > 1 else ""
    table = Table(title=f"the whole run {config.name}{several}", title_justify="left", show_header=False)
    for name, value in [
        *_prep_rows(config, shapes.get("prep"), text),
        *_token_rows(config, text.estimate),
        *_hours(config, shapes, chip),
        *_disk_rows(needs),
        ("disk in all", _total(needs)),
    ]:
        table.add_row(name, value)
    return table


def disk_needs(
    config: RunConfig, stages: Sequence[Stage], text: Text, *, each_checkpoint: bool = False
) -> list[DiskNeed]:
    """What the stages write at the most: shards, checkpoints that are kept and the one being written, results."""
    found = []
    if "prep" in stages and text.estimate is not None:
        found.append(_need("shards", config.data_dir, text.estimate.shard_bytes))
    for stage in _TRAINED:
        if stage not in stages:
            continue
        kept, size = saves.checkpoints_kept(config, stage), saves.checkpoint_bytes(config, stage)
        export = 4 * parameters_of(autoencoder_components(config)) if stage == "autoencoder" else 0
        metrics = METRICS_BYTES_PER_STEP * saves.training_of(config, stage).steps
        label = f"{stage}, {kept} checkpoints of {bytes_text(size)}"
        found.append(_need(label, config.workdir / stage, kept * size + export + metrics))
    if "eval" in stages and config.lm is not None:
        checkpoint = config.lm.training.checkpoint
        times = config.lm.training.steps // checkpoint.interval_steps if each_checkpoint else 0
        found.append(_need("evaluation", config.workdir / "eval", (1 + times) * EVALUATION_BYTES))
    return found


def lack_of_space(needs: Sequence[DiskNeed]) -> str:
    """What is wrong where a filesystem has not the space for what is still to be written to it; empty where it has."""
    by_device: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_device.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for group in by_device.values():
        place = _existing(group[0].folder)
        wanted, free = sum(need.bytes_to_come for need in group), shutil.disk_usage(place).free
        if wanted > free:
            parts = ", ".join(f"{need.label} {bytes_text(need.bytes_to_come)}" for need in group)
            return (
                f"{place}: {bytes_text(free)} are free, this run still writes {bytes_text(wanted)} there ({parts}). "
                "Free some space, choose another workdir or data, or keep fewer checkpoints "
                "(lm.training.checkpoint.keep_last, keep_every)"
            )
    return ""


def _prep_rows(config: RunConfig, shape: StageShape | None, seen: Text) -> list[tuple[str, str]]:
    if config.prep is None or shape is None:
        return []
    text = seen.estimate
    if text is None:
        return [("text", f"not seen from here: {seen.problem}")]
    how = "measured on the first documents" if text.sampled else "assumed: no tokenizer to ask"
    return [
        (
            "text",
            f"{text.num_inputs:,} inputs, {bytes_text(text.stored_bytes)} stored, {bytes_text(text.text_bytes)} of "
            f"text, about {text.num_documents:,} documents",
        ),
        ("its tokens", f"about {text.tokens:,.0f}, {text.bytes_per_token:.2f} bytes each ({how})"),
        (
            "time of prep",
            f"{seconds_text(text.seconds(shape.num_tasks))} on {shape.num_tasks} workers at 60 MB/s each",
        ),
    ]


def _token_rows(config: RunConfig, text: Estimate | None) -> list[tuple[str, str]]:
    rows = []
    totals = run_totals(config) if config.lm is not None else None
    if config.autoencoder is not None and totals is not None and totals.autoencoder_tokens:
        stage = config.autoencoder
        rows.append(
            _tokens(
                config,
                "autoencoder",
                stage.split,
                totals.autoencoder_tokens,
                text,
                stage.training.end_of_data,
            )
        )
    if config.lm is not None and totals is not None:
        rows.append(_tokens(config, "lm", "train", totals.lm_tokens, text, config.lm.training.end_of_data))
    return rows


def _tokens(
    config: RunConfig, stage: str, split: str, needed: int, text: Estimate | None, end_of_data: str
) -> tuple[str, str]:
    manifest = config.data_dir / split / MANIFEST_NAME
    available, how = 0.0, ""
    if manifest.is_file():
        available, how = float(Manifest.read(config.data_dir / split).tokens.stored), "prepared"
    elif text is not None:
        available, how = text.tokens * _share(config, split), f"about, of split {split}"
    if not available:
        return f"tokens of {stage}", f"{needed:,} needed; how many there are is not known yet"
    epochs = needed / available
    warning = (
        "; THE DATA ENDS BEFORE THE STEPS (end_of_data: stop)" if end_of_data == "stop" and epochs > 1 else ""
    )
    return (
        f"tokens of {stage}",
        f"{needed:,} needed, {available:,.0f} available ({how}): {epochs:.2f} epochs{warning}",
    )


def _share(config: RunConfig, split: str) -> float:
    splits = config.prep.splits if config.prep is not None else None
    if splits is None:
        return 0.0
    return {
        "heldout": splits.heldout,
        "autoencoder": splits.autoencoder,
        "train": 1 - splits.heldout - splits.autoencoder,
    }[split]


def _hours(
    config: RunConfig, shapes: dict[Stage, StageShape], chip: hardware.Device | None
) -> list[tuple[str, str]]:
    if chip is None or config.lm is None:
        return []
    totals = run_totals(config)
    parts = []
    for shape, flops in ((shapes.get("autoencoder"), totals.autoencoder), (shapes.get("lm"), totals.lm)):
        if shape is not None:
            parts.append((flops / (chip.peak * shape.num_tasks * ASSUMED_MFU), shape.num_tasks))
    if not parts:
        return []
    hours = sum(seconds for seconds, _ in parts) / 3600
    devices = sum(seconds * ranks for seconds, ranks in parts) / 3600
    return [(f"training at {ASSUMED_MFU:.0%} MFU", f"{hours:,.1f} h, {devices:,.0f} GPU-hours")]


def _disk_rows(needs: Sequence[DiskNeed]) -> list[tuple[str, str]]:
    """A line for what one run writes, or several runs of a sweep alike."""
    alike: dict[str, list[float]] = {}
    for need in needs:
        alike.setdefault(need.label, []).append(need.bytes_in_all)
    return [
        (f"disk: {label}" + (f", {len(sizes)} runs" if len(sizes) > 1 else ""), bytes_text(sum(sizes)))
        for label, sizes in alike.items()
    ]


def _total(needs: Sequence[DiskNeed]) -> str:
    in_all, to_come = sum(n.bytes_in_all for n in needs), sum(n.bytes_to_come for n in needs)
    if not needs:
        return "not known"
    place = _existing(needs[-1].folder)
    there = "" if to_come == in_all else f", {bytes_text(to_come)} still to come"
    return f"{bytes_text(in_all)}{there}; {bytes_text(shutil.disk_usage(place).free)} free on {place}"


def _need(label: str, folder: Path, size: float) -> DiskNeed:
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return DiskNeed(label, folder, size, there)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.is_dir() else next(parent for parent in folder.parents if parent.is_dir())
