"""What the controller knows, and what is put into its queue or taken out of it.

Only squeue is asked, never sacct: many sites, and our tests, have no accounting database.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import LaunchError
from launchers.inherited import client_environment
from launchers.slurm.record import RunRecord, SubmittedJob

_FORMAT = "%i|%T|%r|%L|%S|%N|%K|%F"
_SECONDS = 60
_NO_SLURM = ("configuration source", "configuration file", "Unable to contact slurm controller")
"""What the clients say where there is no cluster behind them."""
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT")


@dataclass(frozen=True)
class Queue:
    """An answer of the controller: this user's jobs by base id, or why there is none."""

    jobs: dict[str, list[QueuedJob]]
    error: str = ""


@dataclass(frozen=True)
class QueuedJob:
    """A job the controller still has. ``job_id`` is ``12`` or, for an array's task, ``12_3``."""

    job_id: str
    state: str
    reason: str
    time_left: str
    start: str
    nodes: str

    @property
    def base_id(self) -> str:
        """The id that the whole array answers to."""
        return self.job_id.split("_")[0]

    @property
    def is_active(self) -> bool:
        """Whether it holds nodes."""
        return self.state in ACTIVE


def available() -> bool:
    """Whether this machine can talk to a SLURM at all."""
    return shutil.which("squeue") is not None


def queued_jobs() -> dict[str, list[QueuedJob]]:
    """This user's jobs by base id. Empty without SLURM.

    Raises:
        LaunchError: SLURM is installed but does not answer.
    """
    if not available():
        return {}
    text = client(["squeue", "--noheader", "--me", "--array", f"--format={_FORMAT}"])
    found: dict[str, list[QueuedJob]] = {}
    for line in text.splitlines():
        if line.count("|") < 7:  # where several clusters answer, each begins with its name
            continue
        job_id, state, reason, left, start, nodes, *_ = line.split("|")
        job = QueuedJob(job_id, state, reason, left, start, nodes)
        found.setdefault(job.base_id, []).append(job)
    return found


def look() -> Queue:
    """The queue as it is; a SLURM that does not answer is told, not raised."""
    try:
        return Queue(queued_jobs())
    except LaunchError as problem:
        return Queue({}, str(problem))


def client(command: Sequence[str]) -> str:
    """Run a SLURM command and return its output.

    Of what schedulers export only the cluster's name reaches it (`launchers.inherited`): the rest would override what
    stands in the scripts, or change what it prints.

    Raises:
        LaunchError: it is missing, fails (quotes what it said) or does not answer, or there is no cluster behind it.
    """
    try:
        done = subprocess.run(
            list(command),
            env=client_environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} was not found: this machine has no SLURM client. On the cluster's login node it has; "
            "`calm-scale submit --dry-run` works without"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {_SECONDS} s: is the controller up?") from None
    if done.returncode and any(word in done.stderr for word in _NO_SLURM):
        raise LaunchError(
            f"SLURM does not work on this machine ({command[0]} finds no configuration or no controller): on the "
            "cluster's login node it should; `squeue` alone shows SLURM's own words"
        )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise LaunchError(f"{command[0]} failed ({done.returncode}): " + " ".join(said))
    return done.stdout.strip()


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
    """Mapping[str, list[QueuedJob]] what is neither done nor queued.

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


def _queued(
    record: RunRecord, stage: str, mark: str, queue: Mapping[str, list[QueuedJob]]
) -> SubmittedJob | None:
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
