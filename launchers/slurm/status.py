"""What a run's jobs are doing, from squeue and from what the job scripts wrote down. No torch, no sacct.

The caller adds what the stages themselves record (step, tokens/s, checkpoints).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from calm_scale.config.run_folder import RunFolder, Stage
from launchers.slurm import queue
from launchers.slurm.notice import measured
from launchers.slurm.queue import Queue, QueuedJob
from launchers.slurm.record import Attempt, Exclusion, RunRecord, SubmittedJob


@dataclass(frozen=True)
class JobStatus:
    """One stage of one run.

    Attributes:
        state: SLURM's state in lower case while the controller has the job (``running``, ``pending``, …), else
            ``done``, ``stopped`` (with a verdict), ``cancelled``, ``lost`` (submitted, but neither queued nor
            ended by its script), or ``not submitted``.
        reason: why it waits.
        job_id: its job (``12`` or ``12_3``); None before submission.
        attempts: every life so far; ``restarts`` is one less.
        time_left: of the current life, as squeue prints it.
        seconds_per_step, seconds_per_save: as measured; None before.
        verdict: the end of the last failing attempt.
    """

    stage: str
    state: str
    reason: str = ""
    job_id: str | None = None
    attempts: tuple[Attempt, ...] = ()
    time_left: str = ""
    nodes: str = ""
    seconds_per_step: float | None = None
    seconds_per_save: float | None = None
    verdict: str = ""

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, len(self.attempts) - 1)


@dataclass(frozen=True)
class RunStatus:
    """All stages of a run."""

    workdir: Path
    stages: tuple[JobStatus, ...]
    evaluations: dict[int, str] = field(default_factory=dict)
    excluded: tuple[Exclusion, ...] = ()


def job_status(workdir: Path, seen: Queue | None = None) -> RunStatus:
    """The state of every stage that was submitted or has run as a job. Works, from disk alone, without SLURM.

    Args:
        seen: the queue, where several runs are looked at; default asks for it.
    """
    record = RunRecord(workdir.absolute())
    seen = seen or queue.look()
    jobs = seen.jobs
    known = record.jobs()
    stages = tuple(
        _stage(record, stage, known.get(stage), jobs, bool(seen.error) or not queue.available())
        for stage in Stage
    )
    evaluations = {
        step: next((found.state.lower() for found in jobs.get(job, [])), "ended")
        for step, job in record.evaluation_jobs().items()
    }
    return RunStatus(record.workdir, stages, evaluations, tuple(record.exclusions.current()))


def _stage(
    record: RunRecord,
    stage: Stage,
    submitted: SubmittedJob | None,
    jobs: dict[str, list[QueuedJob]],
    blind: bool,
) -> JobStatus:
    attempts = tuple(record.attempts(stage))
    step_seconds, save_seconds = measured(RunFolder(record.workdir).stage(stage).ledger)
    status = JobStatus(
        stage=stage,
        state="not submitted",
        job_id=submitted.task_id if submitted else None,
        attempts=attempts,
        seconds_per_step=step_seconds,
        seconds_per_save=save_seconds,
        verdict=record.verdict(stage),
    )
    found = _find(submitted, jobs)
    if found is not None:
        return _with(
            status,
            state=found.state.lower(),
            reason="" if found.reason == "None" else found.reason,
            time_left=found.time_left,
            nodes=found.nodes,
        )
    if submitted and record.is_done(stage, submitted.fingerprint):
        return _with(status, state="done")
    if submitted is None:
        return _with(status, state="done" if record.has_finished(stage) else "not submitted")
    return _with(status, state=_ended(attempts, blind))


def _ended(attempts: tuple[Attempt, ...], blind: bool) -> str:
    """A job the controller no longer has (or that we cannot ask about)."""
    last = attempts[-1] if attempts else None
    if last is None or not last.cause:
        return "unknown" if blind else "lost"
    if last.cause == "cancelled":
        return "cancelled"
    return "unknown" if blind and last.cause in ("limit", "asked", "crash", "outside") else "stopped"


def _find(submitted: SubmittedJob | None, jobs: dict[str, list[QueuedJob]]) -> QueuedJob | None:
    if submitted is None:
        return None
    for job in jobs.get(submitted.job_id, []):
        if job.job_id == submitted.task_id:
            return job
    return None


def _with(status: JobStatus, **changes: str) -> JobStatus:
    from dataclasses import replace

    return replace(status, **changes)  # type: ignore[arg-type]
