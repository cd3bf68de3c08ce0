"""Prepared splits: opened, checked against the run, and made ready for a job on every rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import ENCODES, ReadingConfig, TokenizerConfig
from calm_scale.config.quantities import counted
from calm_scale.config.run_folder import Stage
from data_prep.errors import ShardError
from data_prep.shards.manifest import MANIFEST_NAME, Manifest
from data_prep.shards.reading import ShardDataset, find_shard_problems
from data_prep.shards.staging import Staged, stage_split

if TYPE_CHECKING:
    from calm_scale.runtime.world import World

D = TypeVar("D", ShardDataset, ShardDataset | None)
AUTO_BYTES = 4e9
"""``reading.check: auto`` reads the shards through where that is at most so many bytes a rank."""


def open_split(
    config: RunConfig, split: str, tokens_per_sample: int, *, partial: bool = False
) -> ShardDataset:
    """The samples of one split: whole ones, and with ``partial`` the shorter last ones too.

    Raises:
        ConfigError: the split is not prepared, or its ids or alignment do not fit the run.
        ShardError: a shard is missing or changed.
    """
    folder = config.data_dir / split
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{folder}: no prepared `{split}` split ({MANIFEST_NAME} is missing); run `calm-scale prep` first"
        )
    dataset = ShardDataset(folder, tokens_per_sample, partial=partial)
    manifest = dataset.manifest
    if manifest.max_id >= config.vocab_size:
        raise ConfigError(
            f"{folder}: holds token id {manifest.max_id}, but vocab_size is {config.vocab_size}; "
            f"set vocab_size to at least {manifest.max_id + 1}"
        )
    if manifest.alignment % config.patch_size:
        raise ConfigError(
            f"{folder}: documents are aligned to {manifest.alignment} tokens, patch_size {config.patch_size} "
            "does not divide that; prepare the data with another prep.alignment"
        )
    return dataset


def training_split(config: RunConfig, stage: Stage) -> str:
    """The split that a stage trains on."""
    return (
        config.autoencoder.split if stage == Stage.AUTOENCODER and config.autoencoder is not None else "train"
    )


def open_training_split(config: RunConfig, split: str, tokens_per_sample: int) -> ShardDataset:
    """The samples that a stage trains on.

    Raises:
        ConfigError: as ``open_split``, or the run's own data was prepared otherwise than the document says.
        ShardError: a shard is missing or changed, or the split holds not even one sample.
    """
    dataset = open_split(config, split, tokens_per_sample)
    dataset.refuse_none()
    other = prepared_otherwise(config, dataset.manifest)
    if other and config.data is None:
        raise ConfigError(
            f"{dataset.split_dir}: {'; '.join(other)}; restore the document's value, prepare again with "
            "`calm-scale prep --restart`, or name data that was prepared elsewhere in `data`"
        )
    return dataset


def prepared_otherwise(config: RunConfig, manifest: Manifest) -> list[str]:
    """Settings of prep and tokenizer under which the document would have made other shards than the manifest's."""
    prep = config.prep
    if prep is None:
        return []
    pairs: list[tuple[str, object, object]] = [
        ("prep.sequence_length", prep.sequence_length, manifest.sequence_length),
        ("prep.alignment", prep.alignment, manifest.alignment),
        ("prep.packing", prep.packing, manifest.packing),
        ("prep.dtype", manifest.dtype if prep.dtype == "auto" else prep.dtype, manifest.dtype),
        ("tokenizer.add_bos", config.tokenizer.add_bos, manifest.add_bos),
        ("tokenizer.add_eos", config.tokenizer.add_eos, manifest.add_eos),
    ]
    return [f"{key} is {ours}, the shards have {theirs}" for key, ours, theirs in pairs if ours != theirs]


def as_prepared(config: RunConfig, manifest: Manifest) -> RunConfig:
    """The run with the special tokens, the BOS/EOS policy and the encoder of its shards, whatever the document says.

    A model continues texts that are encoded as in its training; the shards may have been prepared elsewhere (``data``).
    """
    stated = manifest.provenance.get("tokenizer", {})
    settings = {name: stated[name] for name in ENCODES if name in stated}
    if settings.get("encoder") == "auto":  # which gives the ids of any encoder
        del settings["encoder"]
    settings |= {"add_bos": manifest.add_bos, "add_eos": manifest.add_eos}
    tokenizer = TokenizerConfig.model_validate({**config.tokenizer.model_dump(), **settings})
    return config.model_copy(update={"tokenizer": tokenizer})


def open_if_prepared(config: RunConfig, split: str, tokens_per_sample: int) -> ShardDataset | None:
    """The samples of a split, or None where the run has none."""
    if not (config.data_dir / split / MANIFEST_NAME).is_file():
        return None
    dataset = open_split(config, split, tokens_per_sample)
    return dataset if len(dataset) else None


def open_together(
    world: World, folder: Path, look: Callable[[], D], beat: Callable[[], object] = lambda: None
) -> D:
    """The split in ``folder`` that ``look`` opens and checks on the first rank, on every rank. Collective.

    The other ranks are told what it found: each looks at the manifest's size once, and opens a shard when it reads it.

    Raises:
        LateFileError: the ranks still see different manifests after the wait.
        CalmScaleError: on every rank, what ``look`` raises.
    """
    from launchers.ranks import see_alike

    if world.world_size == 1:
        return look()
    see_alike(world, folder, lambda: _manifest_seen(folder))
    opened: list[D] = []

    def look_first() -> tuple[Any, ...] | None:
        dataset = look()
        opened.append(dataset)
        if dataset is None:
            return None
        manifest = dataset.manifest.model_dump(mode="json")  # plain data
        return dataset.tokens_per_sample, dataset.partial, manifest, dataset.num_bytes

    told = world.on_first(look_first, patience=beat)
    if opened:
        return opened[0]
    if told is None:
        return None  # type: ignore[return-value]
    tokens_per_sample, partial, manifest, num_bytes = told
    seen = (Manifest.model_validate(manifest), num_bytes)
    return ShardDataset(folder, tokens_per_sample, partial=partial, seen=seen)


def open_data(
    config: RunConfig, stage: Stage, world: World, beat: Callable[[], object]
) -> tuple[ShardDataset, ShardDataset | None]:
    """The splits of a training, opened together and made ready: the one it trains on, and the held-out one if any.

    Raises: as ``open_together``, ``open_training_split`` and ``make_ready``.
    """
    split = training_split(config, stage)
    tokens_per_sample = config.require_stage(stage).sample_patches * config.patch_size
    data = open_together(
        world,
        config.data_dir / split,
        lambda: open_training_split(config, split, tokens_per_sample),
        beat,
    )
    heldout = open_together(
        world,
        config.data_dir / "heldout",
        lambda: open_if_prepared(config, "heldout", tokens_per_sample),
        beat,
    )
    ready = make_ready(config, data, world, beat)
    return ready, None if heldout is None else make_ready(config, heldout, world, beat)


def _manifest_seen(folder: Path) -> set[str]:
    try:
        return {f"{MANIFEST_NAME} ({(folder / MANIFEST_NAME).stat().st_size} bytes)"}
    except OSError:
        return set()


def make_ready(
    config: RunConfig, dataset: ShardDataset, world: World, beat: Callable[[], object] = lambda: None
) -> ShardDataset:
    """The split to read from now on: its copy on this node, or itself, checked as ``reading`` says. Collective.

    ``beat`` is called again and again while ranks copy or check: that may take longer than a watchdog's limit.

    Raises:
        ConfigError: ``reading.stage_to`` names a variable that is not set, or the prepared data's own folder.
        ShardError: on every rank, what failed on one: a damaged shard, a full disk.
    """
    from launchers.ranks import see_alike

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
    see_alike(world, place, lambda: _manifest_seen(place))
    seen = (dataset.manifest, dataset.num_bytes)
    return ShardDataset(place, dataset.tokens_per_sample, partial=dataset.partial, seen=seen)


def _check(
    reading: ReadingConfig, dataset: ShardDataset, world: World, console: Console, beat: Callable[[], object]
) -> None:
    manifest = dataset.manifest
    size = dataset.num_bytes
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
            if problems := find_shard_problems(dataset.split_dir, manifest, entry):
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
