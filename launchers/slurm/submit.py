"""From a run and a cluster profile to a chain of jobs: prep → autoencoder → lm → eval.

Submitting the same run again is harmless: a stage that is done is left alone, a job that is queued or running is
kept, and only what is missing is queued.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from calm_scale.config import ConfigError, RunConfig, config_hash, to_yaml
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.files import write_atomically
from calm_scale.config.run_folder import RunFolder, Stage
from launchers.slurm.layout import StageShape, common_shape
from launchers.slurm.notice import backstop_seconds, notice_seconds
from launchers.slurm.queue import QueuedStage, enqueue
from launchers.slurm.record import RunRecord
from launchers.slurm.templates import ScriptRun, check_path, render

Outcome = Literal["written", "submitted", "queued already", "done already"]


@dataclass(frozen=True)
class StageJob:
    """What became of one stage: its script, its shape, its job id (None when nothing was queued).

    ``outcome`` is that of the task that needed most; ``num_tasks`` is the number of runs, ``num_submitted`` how many of
    them this submission queued. Several jobs of one array stage have their ids joined by commas.
    """

    stage: Stage
    shape: StageShape
    script: Path
    notice_seconds: int
    outcome: Outcome
    job_id: str | None = None
    num_tasks: int = 1
    num_submitted: int = 0


@dataclass(frozen=True)
class Submission:
    """A chain of jobs. ``folder`` holds the scripts and the resolved configuration(s)."""

    name: str
    workdirs: tuple[Path, ...]
    folder: Path
    jobs: tuple[StageJob, ...]
    dry_run: bool


def submit(
    config: RunConfig,
    cluster: ClusterConfig,
    config_path: Path | None = None,
    dry_run: bool = False,
    stages: Sequence[Stage] | None = None,
) -> Submission:
    """Write the scripts of a run into ``<workdir>/slurm`` and queue them.

    Args:
        config_path: the file the run came from, for error messages.
        dry_run: write the scripts and queue nothing.
        stages: a part of the chain; default every stage the run has a section for.

    Raises:
        ConfigError: a layout or a path that cannot work.
        LaunchError: SLURM does not answer or refuses a job; a queued job has another configuration.
    """
    folder = RunFolder(config.workdir.absolute()).slurm
    return _submit([config], cluster, config.name, folder, dry_run, stages, str(config_path or config.name))


def submit_sweep(
    configs: Sequence[RunConfig],
    cluster: ClusterConfig,
    folder: Path,
    name: str = "sweep",
    dry_run: bool = False,
    stages: Sequence[Stage] | None = None,
    after: str | None = None,
) -> Submission:
    """The same for several runs of one shape as job arrays: each task its own run, requeued on its own.

    Args:
        folder: where the sweep's scripts and logs go; each run keeps its state in its own workdir.
        after: a job that all of them wait for.

    Raises:
        ConfigError: runs share a workdir, or need different resources.
    """
    workdirs = [config.workdir.absolute() for config in configs]
    twice = sorted({str(path) for path in workdirs if workdirs.count(path) > 1})
    if not configs or twice:
        raise ConfigError(
            f"sweep: the runs need a workdir each; shared: {', '.join(twice)}. Name them apart"
            if twice
            else "sweep: there are no runs"
        )
    return _submit(list(configs), cluster, name, folder.absolute(), dry_run, stages, name, after)


def _submit(
    configs: list[RunConfig],
    cluster: ClusterConfig,
    name: str,
    folder: Path,
    dry_run: bool,
    stages: Sequence[Stage] | None,
    origin: str,
    after: str | None = None,
) -> Submission:
    chain = _chain(configs, stages, origin)
    shapes = {stage: common_shape(configs, cluster, stage) for stage in chain}
    records = [RunRecord(config.workdir.absolute()) for config in configs]
    check_path(folder)
    for record in records:
        check_path(record.workdir)
        record.create()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for config, record in zip(configs, records, strict=True):
        write_atomically(_stored(config, record), to_yaml(config))
    jobs = [_write(stage, shapes[stage], configs, records, cluster, name, folder) for stage in chain]
    if not dry_run:
        with contextlib.ExitStack() as locks:
            for record in sorted(records, key=lambda record: record.workdir):
                locks.enter_context(record.locked())
            prints = {stage: [fingerprint(config, stage) for config in configs] for stage in chain}
            found = enqueue([(job.stage, job.script, prints[job.stage]) for job in jobs], records, after)
        jobs = [_with_outcome(job, stage) for job, stage in zip(jobs, found, strict=True)]
    return Submission(name, tuple(record.workdir for record in records), folder, tuple(jobs), dry_run)


def _with_outcome(job: StageJob, found: QueuedStage) -> StageJob:
    outcome: Outcome = "submitted" if found.submitted else "queued already" if found.kept else "done already"
    return replace(
        job,
        outcome=outcome,
        job_id=",".join(found.job_ids) or None,
        num_tasks=len(found.done) + len(found.kept) + len(found.submitted),
        num_submitted=len(found.submitted),
    )


def _stored(config: RunConfig, record: RunRecord) -> Path:
    """Where the jobs of this configuration find it; a later submission does not change what is queued."""
    return record.folder / f"config-{config_hash(config)}.yaml"


def _chain(configs: list[RunConfig], stages: Sequence[Stage] | None, origin: str) -> list[Stage]:
    present = configs[0].stages
    if any(config.stages != present for config in configs):
        raise ConfigError(f"{origin}: the runs of a sweep must have the same sections")
    missing = [stage for stage in stages or () if stage not in present]
    if missing or not present:
        raise ConfigError(
            f"{origin}: there is no section for stage {', '.join(missing) or 'prep, autoencoder or lm'}"
        )
    return [stage for stage in present if stages is None or stage in stages]


def _write(
    stage: Stage,
    shape: StageShape,
    configs: list[RunConfig],
    records: list[RunRecord],
    cluster: ClusterConfig,
    name: str,
    folder: Path,
) -> StageJob:
    runs = [
        ScriptRun(
            workdir=record.workdir,
            config=_stored(config, record),
            fingerprint=fingerprint(config, stage),
            progress=_progress_folder(config, stage).absolute(),
        )
        for config, record in zip(configs, records, strict=True)
    ]
    fixed = cluster.requeue.notice_seconds
    notice = fixed or max(notice_seconds(RunFolder(record.workdir).stage(stage).ledger) for record in records)
    excluded = sorted({entry.node for record in records for entry in record.exclusions.current()})
    text = render(
        shape,
        cluster,
        runs,
        title=name,
        folder=folder,
        working_directory=Path.cwd(),
        notice=fixed or backstop_seconds(notice, shape.time),
        exclude=excluded,
    )
    script = folder / f"{stage}.sbatch"
    write_atomically(script, text)
    return StageJob(stage, shape, script, notice, "written")


def _progress_folder(config: RunConfig, stage: Stage) -> Path:
    """Where progress of a stage shows: checkpoints by step, or files."""
    if stage == Stage.PREP:
        return config.data_dir
    return config.folder.evaluations if stage == Stage.EVAL else config.folder.stage(stage).checkpoints


def fingerprint(config: RunConfig, stage: Stage) -> str:
    """Hash of everything the stage and the stages before it depend on: a later section changes no earlier stage."""
    earlier = list(Stage)[: list(Stage).index(stage) + 1]
    names = {name for name in RunConfig.model_fields if RunConfig.policy_on(name).job in earlier}
    document = config.model_dump(mode="json", include=names)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
