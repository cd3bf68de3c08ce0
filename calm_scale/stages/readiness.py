"""Prepared splits made ready for a job: copied to each node, or checked where they are; one verdict for all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import ReadingConfig
from calm_scale.config.wording import counted
from data_prep.errors import ShardError
from data_prep.reading import ShardDataset
from data_prep.staging import Staged, stage_split
from data_prep.verify import shard_problems

if TYPE_CHECKING:
    from calm_scale.runtime.world import World

AUTO_BYTES = 4e9
"""``reading.check: auto`` reads the shards through where that is at most so many bytes a rank."""


def make_ready(
    config: RunConfig, dataset: ShardDataset, world: World, beat: Callable[[], object] = lambda: None
) -> ShardDataset:
    """The split to read from now on: its copy on this node, or itself, checked as ``reading`` says. Collective.

    ``beat`` is called again and again while ranks copy or check: that may take longer than a watchdog's limit.

    Raises:
        ConfigError: ``reading.stage_to`` names a variable that is not set, or the prepared data's own folder.
        ShardError: on every rank, what failed on one: a damaged shard, a full disk.
    """
    console = Console(stderr=True, quiet=not world.is_first, highlight=False, soft_wrap=True)
    if config.reading.stage_to is None:
        _check(config.reading, dataset, world, console, beat)
        return dataset
    place = _local_place(config.reading.stage_to, dataset)
    copies = world.local_rank == 0
    staged = world.everywhere(
        lambda: stage_split(dataset.split_dir.absolute(), place) if copies else None, patience=beat
    )
    console.print(f"[data] {_report([s for s in staged if s is not None])}", markup=False)
    return ShardDataset(place, dataset.tokens_per_sample, partial=dataset.partial)


def _check(
    reading: ReadingConfig, dataset: ShardDataset, world: World, console: Console, beat: Callable[[], object]
) -> None:
    manifest = dataset.manifest
    size = sum((dataset.split_dir / entry.name).stat().st_size for entry in manifest.shards)
    if reading.check == "headers" or (reading.check == "auto" and size > AUTO_BYTES * world.world_size):
        console.print(
            f"[data] {dataset.split_dir}: {size / 1e9:,.1f} GB, headers and sizes are right; the checksums were not "
            "checked (`calm-scale prep verify`, or reading.check: full)",
            markup=False,
        )
        return
    mine = manifest.shards[world.rank :: world.world_size]

    def work() -> None:
        for entry in mine:
            if problems := shard_problems(dataset.split_dir, manifest, entry):
                raise ShardError("\n".join(problems))

    world.everywhere(work, patience=beat)


def _local_place(stage_to: str, dataset: ShardDataset) -> Path:
    """One folder per split, content and form, so that runs on one node share a copy or do not meet."""
    root = os.path.expandvars(stage_to)
    if "$" in root:
        raise ConfigError(
            f"reading.stage_to: {stage_to} names a variable that is not set on {socket.gethostname()}"
        )
    folder, data = Path(root).absolute(), dataset.split_dir.absolute().parent
    if folder.resolve().is_relative_to(data.resolve()):
        raise ConfigError(
            f"reading.stage_to: {folder} is inside the prepared data {data}; name a folder on a disk of the node"
        )
    manifest = dataset.manifest
    form = "-zstd" if any(entry.compressed for entry in manifest.shards) else ""
    return folder / f"{manifest.split}-{dataset.fingerprint[:16]}{form}"


def _report(staged: list[Staged]) -> str:
    copied = sum(s.num_bytes for s in staged)
    kept = sum(s.num_kept for s in staged)
    slowest = max(s.seconds for s in staged)
    return (
        f"staged to {staged[0].place} on {counted(len(staged), 'node')}: {copied / 1e6:,.1f} MB copied and checked in "
        f"{slowest:.1f} s, {kept:,} shards were there"
    )
