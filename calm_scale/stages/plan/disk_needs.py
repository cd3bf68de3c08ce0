"""What a run, or the runs of a sweep, will write: by part, summed, against what the filesystems have free."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calm_scale.accounting import saves
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.model_components import autoencoder_components
from calm_scale.config import RunConfig
from calm_scale.config.quantities import bytes_text
from calm_scale.config.run_folder import TRAINED, Stage
from data_prep.prep.prep_plan import Estimate

METRICS_BYTES_PER_STEP = 600
EVALUATION_BYTES = 5_000_000


@dataclass(frozen=True)
class DiskNeed:
    """What one part of a run writes, where, how much of it is there already, and what it is made of."""

    label: str
    folder: Path
    bytes_in_all: float
    bytes_there: int
    detail: str = ""

    @property
    def bytes_to_come(self) -> float:
        """Still to be written."""
        return max(0.0, self.bytes_in_all - self.bytes_there)


def disk_needs(
    config: RunConfig, stages: Sequence[Stage], text: Estimate | None, *, each_checkpoint: bool = False
) -> list[DiskNeed]:
    """What the stages write at the most: shards, checkpoints that are kept and the one being written, results."""
    found = []
    if Stage.PREP in stages and text is not None:
        found.append(_need("shards", config.data_dir, text.shard_bytes))
    for stage in TRAINED:
        if stage not in stages:
            continue
        kept, size = saves.checkpoints_kept(config, stage), saves.checkpoint_bytes(config, stage)
        export = 4 * parameters_of(autoencoder_components(config)) if stage == Stage.AUTOENCODER else 0
        metrics = METRICS_BYTES_PER_STEP * config.require_stage(stage).training.steps
        made = "the export, " if export else ""
        detail = f"{made}{kept} checkpoints of {bytes_text(size)}: {saves.kept_text(config, stage)}"
        found.append(_need(stage, config.folder.stage(stage).path, kept * size + export + metrics, detail))
    if Stage.EVAL in stages and config.lm is not None:
        checkpoint = config.lm.training.checkpoint
        times = config.lm.training.steps // checkpoint.interval_steps if each_checkpoint else 0
        found.append(_need("evaluation", config.folder.evaluations, (1 + times) * EVALUATION_BYTES))
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
            alike = _alike(group)
            who = (
                "these runs still write" if any(len(same) > 1 for same in alike) else "this run still writes"
            )
            parts = "; ".join(
                f"{same[0].label} {bytes_text(sum(need.bytes_to_come for need in same))}{_made_of(same)}"
                for same in alike
            )
            return (
                f"{place}: {bytes_text(free)} are free, {who} {bytes_text(wanted)} there: {parts}. "
                "Free some space, choose another workdir or data, or keep fewer checkpoints "
                "(lm.training.checkpoint.keep_last, keep_every)"
            )
    return ""


def disk_rows(needs: Sequence[DiskNeed]) -> list[tuple[str, str]]:
    """A line for what one run writes, or several runs of a sweep alike, and one for all of it."""
    rows = [
        (f"disk: {same[0].label}", bytes_text(sum(need.bytes_in_all for need in same)) + _made_of(same))
        for same in _alike(needs)
    ]
    return [*rows, ("disk in total", _total(needs))]


def _alike(needs: Sequence[DiskNeed]) -> list[list[DiskNeed]]:
    """Needs of the same part and making, of one run or of several."""
    groups: dict[tuple[str, str], list[DiskNeed]] = {}
    for need in needs:
        groups.setdefault((need.label, need.detail), []).append(need)
    return list(groups.values())


def _made_of(same: Sequence[DiskNeed]) -> str:
    several = f"{len(same)} runs" if len(same) > 1 else ""
    return f" ({text})" if (text := " × ".join(filter(None, (several, same[0].detail)))) else ""


def _total(needs: Sequence[DiskNeed]) -> str:
    in_all, to_come = sum(n.bytes_in_all for n in needs), sum(n.bytes_to_come for n in needs)
    if not needs:
        return "not known"
    place = _existing(needs[-1].folder)
    there = "" if to_come == in_all else f", {bytes_text(to_come)} still to come"
    return f"{bytes_text(in_all)}{there}; {bytes_text(shutil.disk_usage(place).free)} free on {place}"


def _need(label: str, folder: Path, size: float, detail: str = "") -> DiskNeed:
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return DiskNeed(label, folder, size, there, detail)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.is_dir() else next(parent for parent in folder.parents if parent.is_dir())
