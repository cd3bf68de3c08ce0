"""`calm-scale prep` and its subcommands: make splits, then verify, inspect, compress or convert them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import SPLITS
from calm_scale.config.errors import EXIT_ERROR, EXIT_OK
from calm_scale.config.quantities import counted
from calm_scale.stages.folders import store_config
from calm_scale.stages.prep_display import (
    PrepProgressLine,
    check_picture,
    draw_lengths,
    make_console,
    show_plan,
    show_report,
    show_split,
    tell,
)


def run_prep(
    config: RunConfig,
    *,
    workers: int | None = None,
    restart: bool = False,
    compress: bool = False,
    dry_run: bool = False,
) -> int:
    """Prepare the data; under MPI every rank calls it. With ``dry_run`` print the plan and what the command would
    find in the data folder, or fail as it would, and write nothing.

    Args:
        workers: processes on this machine, instead of ``prep.workers``.
        restart: discard what an earlier prep left and begin anew.
        compress: store the finished shards as seekable zstd.
    """
    from data_prep.prep import foresee, prepare
    from data_prep.prep.workers import detect_ranks

    if config.prep is None:
        raise ConfigError(f"run {config.name}: there is no `prep` section; extend configs/data/pile.yaml")
    if workers is not None:
        prep = config.prep.model_copy(update={"workers": workers})
        config = config.model_copy(update={"prep": prep})
    ranks = detect_ranks()
    if dry_run:
        if ranks.rank == 0:
            seen = foresee(config, restart=restart, tell=tell)
            show_plan(seen.plan)
            sys.stdout.write(f"{config.data_dir}: {seen.found}\n")
        return EXIT_OK
    with PrepProgressLine() as progress:
        report = prepare(
            config,
            ranks=ranks,
            restart=restart,
            tell=tell,
            on_accepted=lambda: _store(config),
            on_progress=progress,
        )
    if ranks.rank == 0:
        show_report(report)
    if compress and ranks.rank == 0:
        for split in report.splits:
            compress_shards(config.data_dir / split.name)
    return EXIT_OK


def _store(config: RunConfig) -> None:
    """Keep the document in the run's folder; one that prepares other data for a run leaves the run's own there."""
    if config.data is None or not config.folder.config.exists():
        store_config(config)


if TYPE_CHECKING:
    from data_prep.shards.manifest import Manifest


def verify_shards(folder: Path) -> int:
    """Check a split, or every split of a data folder; 1 when anything is wrong."""
    from data_prep.prep.prep_report import verify_tree

    found = verify_tree(folder)
    console = make_console()
    for one in found:
        verdict = "whole" if one.ok else "DAMAGED"
        console.print(
            f"{one.directory}: {verdict} · {counted(one.num_shards, 'shard')} · {one.num_tokens:,} tokens"
        )
        for problem in one.problems:
            console.print(f"  {problem}")
    return EXIT_OK if all(one.ok for one in found) else EXIT_ERROR


def inspect_shards(
    folder: Path, sequence: int | None = None, tokenizer: Path | None = None, picture: Path | None = None
) -> int:
    """Print what a split holds; one sequence's text; the histogram of document lengths as a picture."""
    from data_prep.prep.prep_report import load_split_tokenizer, read_sequence, require_split
    from data_prep.shards.manifest import Manifest
    from data_prep.shards.reading import ShardDataset

    console = make_console()
    folder = require_split(folder)
    picture = picture and check_picture(picture)
    manifest = Manifest.read(folder)
    if sequence is None:
        ShardDataset(
            folder, manifest.sequence_length
        )  # refuses a shard that is missing, cut, or not the manifest's
        show_split(folder, manifest)
    else:
        stored = read_sequence(folder, sequence, load_split_tokenizer(folder, tokenizer))
        console.print(
            f"sequence {stored.index} · {len(stored.ids):,} tokens · {stored.shard.name} · from {stored.source}"
        )
        shown = (stored.text or "").replace("\x1b", "␛")  # a text must not drive the terminal
        console.print(shown)
    if picture is not None:
        draw_lengths(manifest, picture)
        console.print(f"picture: {picture}")
    return EXIT_OK


def compress_shards(folder: Path) -> int:
    """Replace the shards of a split by their zstd form, which trains as it is."""
    from data_prep.shards.compressed import compress_split

    return _turn(folder, compress_split, "compressed")


def expand_shards(folder: Path) -> int:
    """The reverse of ``compress_shards``; the bytes are checked."""
    from data_prep.shards.compressed import expand_split

    return _turn(folder, expand_split, "expanded")


def _turn(folder: Path, convert: Callable[[Path], Manifest], form: str) -> int:
    from data_prep.prep.prep_report import require_split
    from data_prep.shards.manifest import Manifest

    before = Manifest.read(require_split(folder)).shards
    after = convert(folder).shards
    turned = sum(was != now for was, now in zip(before, after, strict=True))
    done = f"{counted(turned, 'shard')} {form}" if turned else f"nothing to do, every shard is {form}"
    make_console().print(f"{folder}: {done}")
    return EXIT_OK


def export_pair(folder: Path, prefix: Path) -> int:
    """Write a split as Megatron's ``.bin``/``.idx`` pair."""
    from data_prep.prep.megatron import export_megatron
    from data_prep.prep.prep_report import require_split

    count = export_megatron(require_split(folder), prefix)
    make_console().print(f"{counted(count, 'sequence')} written to {prefix}.bin and .idx")
    return EXIT_OK


def import_pair(config: RunConfig, prefix: Path, split: str) -> int:
    """Repack a Megatron ``.bin``/``.idx`` pair into a split of a run, without tokenizing again."""
    from data_prep.prep.megatron import PADDING_UNKNOWN, import_megatron
    from data_prep.prep.prep_report import store_definition
    from data_prep.tokenizer import load_tokenizer

    if config.prep is None:
        raise ConfigError(f"run {config.name}: there is no `prep` section, which says how to pack")
    if split not in SPLITS:
        raise ConfigError(f"--split {split}: a run has the splits {', '.join(SPLITS)}")
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    manifest = import_megatron(
        prefix,
        config.data_dir,
        tokenizer,
        config.prep,
        vocab_size=config.vocab_size,
        split=split,
        stated=config.tokenizer.model_copy(update={"path": config.tokenizer_path}),
    )
    store_definition(config.tokenizer_path, config.data_dir)
    console = make_console()
    console.print(f"{manifest.num_sequences:,} sequences in {config.data_dir / split}")
    if PADDING_UNKNOWN in manifest.notes:
        console.print(
            "the pair does not say which ids are padding: all count as text, and its documents as documents"
        )
    return EXIT_OK
