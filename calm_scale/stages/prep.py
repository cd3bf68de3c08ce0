"""`calm-scale prep`: the prep section of a run, and looking into what it wrote."""

from __future__ import annotations

import sys

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.stages.prep_display import PrepProgressLine, show_plan, show_report, tell
from calm_scale.stages.prepared import compress_shards
from calm_scale.stages.run_folder import store_config


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
