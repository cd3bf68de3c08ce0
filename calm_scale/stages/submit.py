"""`calm-scale submit` and `cancel`: a run's chain of jobs on SLURM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.accounting import hardware
from calm_scale.config import ConfigError, RunConfig, load_as
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.errors import EXIT_OK, EXIT_USAGE
from calm_scale.config.run import notes as config_notes
from calm_scale.config.run_folder import TRAINED, Stage
from calm_scale.stages.before_start import problems, resume_refusals
from calm_scale.stages.folders import runs_in
from calm_scale.stages.plan.disk_needs import disk_needs, lack_of_space
from calm_scale.stages.plan.dry_run import print_notes, stage_plan
from calm_scale.stages.plan.run_plan import lack_of_tokenizer, look_at_text, run_plan
from calm_scale.stages.sweep import Sweep
from launchers.slurm.container import unseen_paths
from launchers.slurm.layout import StageShape, common_shape
from launchers.slurm.queue import cancel
from launchers.slurm.record import RunRecord
from launchers.slurm.submit import StageJob, Submission, submit, submit_sweep


def submit_run(
    config: RunConfig,
    config_path: Path,
    cluster_path: Path,
    *,
    dry_run: bool,
    notes: Sequence[str] = (),
    include: Sequence[str] = (),
) -> int:
    """Write the job scripts, print what they ask for and ``notes``, and queue what is missing unless ``dry_run``.

    Nodes of ``include`` that a preflight had excluded are taken back.
    """
    cluster = load_as(ClusterConfig, cluster_path)
    console = Console()
    _lift(console, [config], include)
    refusals = _plan(console, config, config.stages, cluster, dry_run)
    submission = submit(config, cluster, config_path, dry_run=dry_run)
    _show(console, submission, config, cluster)
    print_notes(console, notes)
    return _end(console, config.workdir, dry_run, refusals)


def submit_the_sweep(
    sweep: Sweep,
    config_path: Path,
    cluster_path: Path,
    *,
    dry_run: bool,
    notes: Sequence[str] = (),
    include: Sequence[str] = (),
) -> int:
    """The same for a sweep: what its runs share as jobs of the base run, the rest as job arrays, a task a run."""
    cluster = load_as(ClusterConfig, cluster_path)
    console = Console()
    _lift(console, [sweep.base, *sweep.runs], include)
    refusals = _plan(console, sweep.base, sweep.shared, cluster, dry_run, sweep)
    last = None
    if sweep.shared:
        base = submit(sweep.base, cluster, config_path, dry_run=dry_run, stages=sweep.shared)
        _show(console, base, sweep.base, cluster)
        last = base.jobs[-1].job_id
    name = f"{sweep.base.name}-sweep"
    submission = submit_sweep(
        sweep.runs, cluster, sweep.folder, name, dry_run=dry_run, stages=sweep.own, after=last
    )
    _show(console, submission, sweep.runs[0], cluster)
    table = Table(title=f"{len(sweep.runs)} runs, each its own folder", title_justify="left")
    for heading in ("task", "run", "folder"):
        table.add_column(heading, overflow="fold")
    for index, run in enumerate(sweep.runs):
        table.add_row(str(index), run.name, str(run.workdir))
    console.print(table)
    print_notes(
        console, [*notes, *dict.fromkeys(f"note: {n}" for run in sweep.runs for n in config_notes(run))]
    )
    return _end(console, sweep.folder, dry_run, refusals)


def _lift(console: Console, configs: Sequence[RunConfig], nodes: Sequence[str]) -> None:
    """Take excluded nodes back, and say of each whether it was excluded."""
    lifted = {
        node
        for config in configs
        for node in RunRecord(config.workdir.absolute()).exclusions.lift(list(nodes))
    }
    for node in dict.fromkeys(nodes):
        known = "no longer excluded" if node in lifted else "was not excluded"
        console.print(Text(f"{node}: {known}"))


def _plan(
    console: Console,
    config: RunConfig,
    stages: Sequence[Stage],
    cluster: ClusterConfig,
    dry_run: bool,
    sweep: Sweep | None = None,
) -> list[str]:
    """Print the whole run (a sweep: the shared stages and those of its runs); why it cannot run, in a dry run.

    Raises:
        ConfigError: a sweep's runs need different jobs; or a disk is too small or the tokenizer is missing, and
            this is no dry run.
    """
    each, text = cluster.eval_each_checkpoint, look_at_text(config)
    shapes, chip = _shapes([config], stages, cluster), _chip(cluster)
    needs = disk_needs(config, stages, text.estimate, each_checkpoint=each)
    if sweep is not None:
        needs += [
            need
            for run in sweep.runs
            for need in disk_needs(run, sweep.own, text.estimate, each_checkpoint=each)
        ]
        shapes |= _shapes(sweep.runs, sweep.own, cluster)
    num_runs = len(sweep.runs) if sweep is not None else 1
    console.print(run_plan(config, shapes, text, needs, chip, num_runs, _no_device(cluster)))
    refusals = [lack_of_space(needs), lack_of_tokenizer(config, text) if "prep" in shapes else ""]
    refusals += problems(config, stages) + resume_refusals(config, stages)
    if sweep is not None:
        for run in sweep.runs:
            refusals += problems(run, sweep.own) + resume_refusals(run, sweep.own)
    if cluster.container is not None:
        for run in [config, *(sweep.runs if sweep is not None else ())]:
            refusals += unseen_paths(run, cluster.container, Path.cwd())
    refusals = list(dict.fromkeys(refusal for refusal in refusals if refusal))
    if refusals and not dry_run:
        raise ConfigError("\n".join(refusals))
    return refusals


def _shapes(
    configs: Sequence[RunConfig], stages: Sequence[Stage], cluster: ClusterConfig
) -> dict[Stage, StageShape]:
    return {stage: common_shape(configs, cluster, stage) for stage in stages}


def _chip(cluster: ClusterConfig) -> hardware.Device | None:
    """The GPU of the profile's nodes; None where it names none that is in the table.

    Raises:
        ConfigError: ``device`` is not in the table.
    """
    if cluster.device is None:
        return next((chip for chip in hardware.DEVICES if chip.key == cluster.gpu_type), None)
    try:
        return hardware.device(cluster.device)
    except hardware.UnknownDeviceError as error:
        raise ConfigError(f"cluster profile {cluster.name}: device: {error}") from None


def _no_device(cluster: ClusterConfig) -> str:
    """Which key of the profile to set for hours and save intervals; for nodes without GPUs there is none."""
    if not cluster.gpus_per_node:
        return ""
    keys = ", ".join(chip.key for chip in hardware.DEVICES)
    return f"the GPU is not named; set `device: …` in the cluster profile ({keys})"


def _show(console: Console, submission: Submission, config: RunConfig, cluster: ClusterConfig) -> None:
    console.print(_table(submission, cluster))
    for job in submission.jobs:
        if job.shape.note:
            console.print(Text(job.shape.note, style="yellow"), soft_wrap=True)
    chip = _chip(cluster)
    unknown = _no_device(cluster) or "no step time can be estimated for nodes without GPUs"
    for job in submission.jobs:
        if job.stage in TRAINED:
            console.print(stage_plan(config, job.stage, job.shape.num_tasks, chip, job.shape.nodes, unknown))
    console.print(f"scripts: {submission.folder}", soft_wrap=True, highlight=False)


def _end(console: Console, folder: Path, dry_run: bool, refusals: Sequence[str]) -> int:
    """What to do next; of a dry run, at the very end, why the submission would be refused."""
    if not dry_run:
        console.print(f"follow it with: calm-scale status {folder}", soft_wrap=True, highlight=False)
        return EXIT_OK
    console.print("dry run: nothing was queued")
    for refusal in refusals:
        console.print(Text(f"would be refused: {refusal}", style="red"), soft_wrap=True)
    return EXIT_USAGE if refusals else EXIT_OK


def cancel_run(run: Path) -> int:
    """Stop the jobs of a run, or of every run of a sweep, after they have saved."""
    done = [cancel(folder) for folder in (runs_in(run) if run.is_dir() else [run])]
    removed = [job for one in done for job in one.removed]
    saving = [job for one in done for job in one.saving]
    console = Console()
    for label, jobs in (("taken out of the queue", removed), ("saving, then ending", saving)):
        if jobs:
            console.print(f"{label}: {', '.join(jobs)}")
    if not removed and not saving:
        console.print("no job of this run is queued or running")
    return EXIT_OK


def _table(submission: Submission, cluster: ClusterConfig) -> Table:
    table = Table(title=f"run {submission.name} on {cluster.name}", title_justify="left")
    for heading in (
        "stage",
        "nodes",
        "tasks/\nnode",
        "GPUs/\nnode",
        "CPUs/\ntask",
        "notice",
        "job",
        "outcome",
    ):
        table.add_column(heading, overflow="fold")
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
        job.outcome + (f" ({job.num_submitted} of {job.num_tasks} tasks)" if job.num_tasks > 1 else ""),
    ]
