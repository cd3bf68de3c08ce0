"""Cancelling: what waits leaves the queue, what runs saves first and then ends without coming back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launchers.errors import LaunchError
from launchers.slurm.queue import client, queued_jobs
from launchers.slurm.record import RunRecord


@dataclass(frozen=True)
class Cancelled:
    """What was done: jobs taken out of the queue, and jobs told to save and end."""

    removed: tuple[str, ...]
    saving: tuple[str, ...]


def cancel(workdir: Path) -> Cancelled:
    """End a run's jobs: those that run save a checkpoint first (watch them with ``status``).

    Raises:
        LaunchError: the folder is no submitted run, or SLURM does not answer.
    """
    record = RunRecord(workdir.absolute())
    if not record.folder.is_dir():
        raise LaunchError(f"{workdir}: no run was submitted from here (there is no {record.folder})")
    removed: list[str] = []
    saving: list[str] = []
    with record.locked():
        queue = queued_jobs()
        mine = [(job.stage, job.task_id) for job in record.jobs().values()]
        mine += [(f"eval-{step}", job) for step, job in record.evaluation_jobs().items()]
        # Waiting jobs first, from the end of the chain: none of them may start when the one before it ends.
        for stage, task_id in reversed(mine):
            found = [
                job for job in queue.get(task_id.split("_")[0], []) if task_id in (job.job_id, job.base_id)
            ]
            for job in found:
                if not job.is_active:
                    client(["scancel", job.job_id])
                    removed.append(job.job_id)
                else:
                    record.request_cancel(stage)
                    client(["scancel", "--signal=USR1", "--batch", job.job_id])
                    saving.append(job.job_id)
    return Cancelled(tuple(removed), tuple(saving))
