"""From a run and a cluster profile to a chain of jobs: prep → autoencoder → lm → eval.

Submitting the same run again is harmless: a stage that is done is left alone, a job that is queued or running is
kept, and only what is missing is queued.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from calm_scale.config import ConfigError, RunConfig, to_yaml
from calm_scale.config.cluster import ClusterConfig
from launchers.errors import LaunchError
from launchers.slurm.layout import Stage, StageShape, shape_of, stages_of
from launchers.slurm.notice import notice_seconds
from launchers.slurm.queue import QueuedJob, client, queued_jobs
from launchers.slurm.record import RunRecord, SubmittedJob, write_whole
from launchers.slurm.templates import ScriptRun, check_path, render

Outcome = Literal["written", "submitted", "queued already", "done already"]
_SECTIONS: dict[Stage, tuple[str, ...]] = {
    "prep": ("seed", "vocab_size", "patch_size", "tokenizer", "data", "prep"),
    "autoencoder": ("autoencoder",),
    "lm": ("lm",),
    "eval": ("evaluation",),
}


@dataclass(frozen=True)
class StageJob:
    """What became of one stage: its script, its shape, its job id (None when nothing was queued)."""

    stage: Stage
    shape: StageShape
    script: Path
    notice_seconds: int
    outcome: Outcome
    job_id: str | None = None


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
    folder = config.workdir.absolute() / "slurm"
    return _submit([config], cluster, config.name, folder, dry_run, stages, str(config_path or config.name))


def submit_sweep(
    configs: Sequence[RunConfig],
    cluster: ClusterConfig,
    folder: Path,
    name: str = "sweep",
    dry_run: bool = False,
    stages: Sequence[Stage] | None = None,
) -> Submission:
    """The same for several runs of one shape as job arrays: each task its own run, requeued on its own.

    Args:
        folder: where the sweep's scripts and logs go; each run keeps its state in its own workdir.

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
    return _submit(list(configs), cluster, name, folder.absolute(), dry_run, stages, name)


def _submit(
    configs: list[RunConfig],
    cluster: ClusterConfig,
    name: str,
    folder: Path,
    dry_run: bool,
    stages: Sequence[Stage] | None,
    origin: str,
) -> Submission:
    chain = _chain(configs, stages, origin)
    shapes = {stage: _common_shape(configs, cluster, stage) for stage in chain}
    records = [RunRecord(config.workdir.absolute()) for config in configs]
    check_path(folder)
    for record in records:
        check_path(record.workdir)
        record.create()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for config, record in zip(configs, records, strict=True):
        write_whole(record.folder / "config.yaml", to_yaml(config))
    jobs = [_write(stage, shapes[stage], configs, records, cluster, name, folder) for stage in chain]
    if not dry_run:
        with records[0].locked():
            jobs = _queue(jobs, configs, records)
    return Submission(name, tuple(record.workdir for record in records), folder, tuple(jobs), dry_run)


def _chain(configs: list[RunConfig], stages: Sequence[Stage] | None, origin: str) -> list[Stage]:
    present = stages_of(configs[0])
    if any(stages_of(config) != present for config in configs):
        raise ConfigError(f"{origin}: the runs of a sweep must have the same sections")
    missing = [stage for stage in stages or () if stage not in present]
    if missing or not present:
        raise ConfigError(
            f"{origin}: there is no section for stage {', '.join(missing) or 'prep, autoencoder or lm'}"
        )
    return [stage for stage in present if stages is None or stage in stages]


def _common_shape(configs: list[RunConfig], cluster: ClusterConfig, stage: Stage) -> StageShape:
    shapes = {shape_of(config, cluster, stage) for config in configs}
    if len(shapes) > 1:
        worlds = ", ".join(sorted(str(shape.num_tasks) for shape in shapes))
        raise ConfigError(
            f"sweep: stage {stage} needs different layouts ({worlds} ranks); submit the runs one by one"
        )
    return shapes.pop()


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
            config=record.folder / "config.yaml",
            fingerprint=fingerprint(config, stage),
            progress=_progress_folder(config, stage).absolute(),
        )
        for config, record in zip(configs, records, strict=True)
    ]
    notice = cluster.requeue.notice_seconds or max(
        notice_seconds(record.workdir / stage / "ledger.jsonl") for record in records
    )
    excluded = sorted({node for record in records for node in record.excluded_nodes()})
    text = render(
        shape,
        cluster,
        runs,
        title=name,
        folder=folder,
        working_directory=Path.cwd(),
        notice=notice,
        exclude=excluded,
    )
    script = folder / f"{stage}.sbatch"
    write_whole(script, text)
    return StageJob(stage, shape, script, notice, "written")


def _progress_folder(config: RunConfig, stage: Stage) -> Path:
    """Where progress of a stage shows: checkpoints by step, or files."""
    if stage == "prep":
        return config.data_dir
    return config.workdir / "eval" if stage == "eval" else config.workdir / stage / "checkpoints"


def fingerprint(config: RunConfig, stage: Stage) -> str:
    """Hash of everything the stage and the stages before it depend on: a later section changes no earlier stage."""
    stages = list(_SECTIONS)
    names = [name for earlier in stages[: stages.index(stage) + 1] for name in _SECTIONS[earlier]]
    document = config.model_dump(mode="json", include=set(names))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _queue(jobs: list[StageJob], configs: list[RunConfig], records: list[RunRecord]) -> list[StageJob]:
    queue = queued_jobs()
    result: list[StageJob] = []
    before: str | None = None
    for job in jobs:
        prints = [fingerprint(config, job.stage) for config in configs]
        if all(record.is_done(job.stage, mark) for record, mark in zip(records, prints, strict=True)):
            result.append(replace(job, outcome="done already"))
            continue
        kept = _kept(job, prints, records, queue)
        outcome: Outcome = "queued already"
        if kept is None:
            kept, outcome = _sbatch(job, before, array=len(records) > 1), "submitted"
            _remember(job, kept, prints, records)
        before = kept
        result.append(replace(job, outcome=outcome, job_id=kept))
    return result


def _kept(
    job: StageJob, prints: list[str], records: list[RunRecord], queue: dict[str, list[QueuedJob]]
) -> str | None:
    """The id of the job that is queued for this stage already."""
    for record, mark in zip(records, prints, strict=True):
        known = record.jobs().get(job.stage)
        if known is None or known.job_id not in queue:
            continue
        if known.fingerprint != mark:
            raise LaunchError(
                f"job {known.job_id} ({job.stage} of {record.workdir}) is in the queue with another configuration: "
                f"cancel it first (calm-scale cancel {record.workdir}), or submit under another name"
            )
        return known.job_id
    return None


def _sbatch(job: StageJob, after: str | None, array: bool) -> str:
    dependency = [f"--dependency={'aftercorr' if array else 'afterok'}:{after}"] if after else []
    answer = client(["sbatch", "--parsable", *dependency, str(job.script)])
    return answer.splitlines()[-1].split(";")[0]


def _remember(job: StageJob, job_id: str, prints: list[str], records: list[RunRecord]) -> None:
    """Written after every job: a submission that breaks off half way is taken up where it stopped."""
    for index, (record, mark) in enumerate(zip(records, prints, strict=True)):
        entry = SubmittedJob(job.stage, job_id, mark, time.time(), index if len(records) > 1 else None)
        record.write_jobs({**record.jobs(), job.stage: entry})
