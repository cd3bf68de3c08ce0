"""A fresh job in place of one that SLURM will not put back into the queue; run by the job script itself.

``python -m launchers.slurm.resubmit --workdir W --stage KEY --job JOB SCRIPT`` queues the script again behind the job
that runs, lets the run's record and the jobs that wait for the old one point at the new one, and prints its id.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launchers.errors import LaunchError
from launchers.slurm.queue import client
from launchers.slurm.record import RunRecord


def resubmit(record: RunRecord, stage: str, job: str, script: Path, exclude: str = "") -> str:
    """The id of the new job (``12`` or, for an array's task, ``12_3``).

    Args:
        stage: the stage, or ``eval-STEP`` for the evaluation of one checkpoint.
        job: the job that cannot be requeued; the new one starts after it has ended.
        exclude: nodes, between commas.

    Raises:
        LaunchError: SLURM refuses the new job too, or does not answer.
    """
    _, _, task = job.partition("_")
    options = [f"--dependency=afterany:{job}"]
    options += [f"--array={task}"] if task else []
    options += [f"--exclude={exclude}"] if exclude else []
    new = client(["sbatch", "--parsable", *options, str(script)]).splitlines()[-1].split(";")[0]
    new_task = f"{new}_{task}" if task else new
    with record.locked():
        jobs = record.jobs()
        if stage in jobs and jobs[stage].task_id == job:
            record.write_jobs({**jobs, stage: replace(jobs[stage], job_id=new)})
        elif stage.startswith("eval-"):
            (record.state / f"eval-{int(stage.removeprefix('eval-')):08d}.submitted").write_text(f"{new}\n")
    for waiting, dependency in _waiting_for(job):
        client(["scontrol", "update", f"JobId={waiting}", f"Dependency={dependency}:{new_task}"])
    return new_task


def _waiting_for(job: str) -> list[tuple[str, str]]:
    """(id, kind of dependency) of the jobs that wait for exactly this one."""
    text = client(["squeue", "--noheader", "--me", "--states=PENDING", "--array", "--format=%i|%E"])
    found = []
    for line in text.splitlines():
        waiting, _, dependency = line.partition("|")
        kind, _, target = dependency.partition("(")[0].partition(":")
        if target == job and kind in ("afterok", "aftercorr"):
            found.append((waiting, "afterok"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Called by a job script; see the module."""
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.resubmit", description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--exclude", default="")
    parser.add_argument("script", type=Path)
    options = parser.parse_args(arguments)
    try:
        new = resubmit(
            RunRecord(options.workdir), options.stage, options.job, options.script, options.exclude
        )
    except LaunchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{new}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
