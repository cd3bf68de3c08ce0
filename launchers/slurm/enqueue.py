"""Queueing what is missing of a chain, task by task, and remembering it.

A run alone has one job a stage; the runs of a sweep share an array a stage, whose task i is run i. What is done or
queued already stays as it is, and each task waits for exactly its own run's stage before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import LaunchError
from launchers.slurm.queue import QueuedJob, client, queued_jobs
from launchers.slurm.record import RunRecord, SubmittedJob

Queue = dict[str, list[QueuedJob]]


@dataclass(frozen=True)
class QueuedStage:
    """What became of a stage. ``done``, ``kept`` and ``submitted`` are indices of runs; ``job_ids`` the jobs' ids."""

    done: tuple[int, ...]
    kept: tuple[int, ...]
    submitted: tuple[int, ...]
    job_ids: tuple[str, ...]


def enqueue(
    stages: Sequence[tuple[str, Path, list[str]]], records: Sequence[RunRecord], after: str | None = None
) -> list[QueuedStage]:
    """Queue what is neither done nor queued.

    Args:
        stages: name, script and every run's fingerprint, in the order of the chain.
        records: the runs; their locks are held by the caller.
        after: a job that the first queued stage waits for.

    Raises:
        LaunchError: SLURM does not answer or refuses a job; a queued job has another configuration.
    """
    queue = queued_jobs()
    before: list[SubmittedJob | None] = [None] * len(records)
    result = []
    for stage, script, prints in stages:
        marks = list(zip(records, prints, strict=True))
        done = [index for index, (record, mark) in enumerate(marks) if record.is_done(stage, mark)]
        known = {
            index: job
            for index, (record, mark) in enumerate(marks)
            if index not in done and (job := _queued(record, stage, mark, queue)) is not None
        }
        missing = [index for index in range(len(records)) if index not in done and index not in known]
        for indices, dependency in _groups(missing, before, after):
            job_id = _sbatch(script, dependency, indices if len(records) > 1 else None)
            for index in indices:
                task = index if len(records) > 1 else None
                job = SubmittedJob(stage, job_id, prints[index], time.time(), task)
                # Written after every job: a submission that breaks off half way is taken up where it stopped.
                records[index].write_jobs({**records[index].jobs(), stage: job})
                known[index] = job
        before = [known.get(index) for index in range(len(records))]
        ids = tuple(dict.fromkeys(job.job_id for _, job in sorted(known.items())))
        kept = tuple(index for index in sorted(known) if index not in missing)
        result.append(QueuedStage(tuple(done), kept, tuple(missing), ids))
        after = None  # what comes later waits for its own run's stage before
    return result


def _queued(record: RunRecord, stage: str, mark: str, queue: Queue) -> SubmittedJob | None:
    """The job that is in the queue for this stage of the run already."""
    known = record.jobs().get(stage)
    if known is None or not any(
        job.job_id in (known.task_id, known.job_id) for job in queue.get(known.job_id, [])
    ):
        return None
    if known.fingerprint != mark:
        raise LaunchError(
            f"job {known.task_id} ({stage} of {record.workdir}) is in the queue with another configuration: "
            f"cancel it first (calm-scale cancel {record.workdir}), or submit under another name"
        )
    return known


def _groups(
    missing: Sequence[int], before: Sequence[SubmittedJob | None], after: str | None
) -> list[tuple[list[int], str | None]]:
    """Tasks that one sbatch can queue together, with what they wait for."""
    groups: dict[str | None, list[int]] = {}
    for index in missing:
        groups.setdefault(_dependency(index, before[index], after), []).append(index)
    return [(indices, dependency) for dependency, indices in groups.items()]


def _dependency(index: int, before: SubmittedJob | None, after: str | None) -> str | None:
    if before is None:
        return f"afterok:{after}" if after else None
    same_place = before.array_index == index
    return f"aftercorr:{before.job_id}" if same_place else f"afterok:{before.task_id}"


def _sbatch(script: Path, dependency: str | None, indices: Sequence[int] | None) -> str:
    options = [f"--dependency={dependency}"] if dependency else []
    options += [f"--array={','.join(map(str, indices))}"] if indices is not None else []
    answer = client(["sbatch", "--parsable", *options, str(script)])
    return answer.splitlines()[-1].split(";")[0]
