"""`calm-scale submit` and `cancel`: a run's chain of jobs on SLURM."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from calm_scale.accounting import hardware
from calm_scale.config import RunConfig, load_as
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.stages.dry_run import stage_plan
from launchers.slurm.cancel import cancel
from launchers.slurm.submit import StageJob, Submission, submit


def submit_run(config: RunConfig, config_path: Path, cluster_path: Path, *, dry_run: bool) -> int:
    """Write the job scripts, print what they ask for, and queue what is missing unless ``dry_run``."""
    cluster = load_as(ClusterConfig, cluster_path)
    console = Console()
    submission = submit(config, cluster, config_path, dry_run=dry_run)
    console.print(_table(submission, cluster))
    gpu = cluster.gpu_type if cluster.gpu_type in {chip.key for chip in hardware.DEVICES} else None
    for job in submission.jobs:
        if job.stage in ("autoencoder", "lm"):
            console.print(stage_plan(config, job.stage, job.shape.num_tasks, gpu, job.shape.nodes))
    console.print(f"scripts: {submission.folder}", soft_wrap=True, highlight=False)
    if dry_run:
        console.print("dry run: nothing was queued")
    else:
        console.print(f"follow it with: calm-scale status {config.workdir}", soft_wrap=True, highlight=False)
    return EXIT_OK


def cancel_run(run: Path) -> int:
    """Stop a run's jobs after they have saved."""
    done = cancel(run)
    console = Console()
    for label, jobs in (("taken out of the queue", done.removed), ("saving, then ending", done.saving)):
        if jobs:
            console.print(f"{label}: {', '.join(jobs)}")
    if not done.removed and not done.saving:
        console.print("no job of this run is queued or running")
    return EXIT_OK


def _table(submission: Submission, cluster: ClusterConfig) -> Table:
    table = Table(title=f"run {submission.name} on {cluster.name}", title_justify="left")
    for heading in (
        "stage",
        "nodes",
        "tasks/node",
        "GPUs/node",
        "CPUs/task",
        "notice",
        "job",
        "what happened",
    ):
        table.add_column(heading)
    for job in submission.jobs:
        table.add_row(*_row(job))
    return table


def _row(job: StageJob) -> list[str]:
    shape = job.shape
    return [
        job.stage,
        str(shape.nodes),
        str(shape.tasks_per_node),
        str(shape.gpus_per_node),
        str(shape.cpus_per_task),
        f"{job.notice_seconds} s",
        job.job_id or "–",
        job.outcome,
    ]
