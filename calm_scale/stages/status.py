"""`calm-scale status`: how a run stands, from its folder, and from squeue where there is one. No torch, no sacct."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from calm_scale.accounting.report.scores import own_and_others
from calm_scale.checkpoint.status import StageStatus, stage_status
from calm_scale.config import RunConfig, load
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.quantities import counted, seconds_text
from calm_scale.config.run_folder import CONFIG_FILE, TRAINED, RunFolder, Stage
from calm_scale.config.terminal import reader_has_gone
from calm_scale.stages.folders import runs_in
from data_prep.shards.manifest import MANIFEST_NAME
from launchers.slurm import queue
from launchers.slurm.status import JobStatus, RunStatus, job_status

REFRESH_SECONDS = 10.0


def show_status(run: Path, watch: bool = False) -> int:
    """Print the state of every stage (of every run of a sweep); with ``watch`` refresh until interrupted."""
    runs = runs_in(run)
    if not watch:
        Console().print(_views(runs))
        return EXIT_OK
    with Live(_views(runs), refresh_per_second=1) as live:
        while not reader_has_gone():
            time.sleep(REFRESH_SECONDS)
            live.update(_views(runs))
    return EXIT_OK


def _views(runs: Sequence[Path]) -> Group:
    """Every run against one look at the queue; a SLURM that does not answer is said once."""
    seen = queue.look()
    parts: list[Group | Text] = [_view(run, seen) for run in runs]
    if seen.error and any(RunFolder(run).slurm.is_dir() for run in runs):
        parts.append(Text(f"the queue could not be asked: {seen.error}", style="dim"))
    return Group(*parts)


def _view(run: Path, seen: queue.Queue) -> Group:
    config = load(run) if (run / CONFIG_FILE).is_file() else None
    jobs = job_status(run, seen)
    parts: list[Table | Text] = [_stages(run, config, jobs)]
    for stage in TRAINED:
        status = _of(run, config, stage)
        parts += [Text(f"{stage}: passed over {line}", style="yellow") for line in status.damaged]
        parts += [
            Text(f"{stage}: {straggler} ({_moment(straggler.since)})", style="yellow")
            for straggler in status.stragglers
        ]
    parts += [Text(f"{job.stage}: {job.verdict}", style="red") for job in jobs.stages if job.verdict]
    parts += [
        Text(f"excluded until {_moment(entry.until)}: {entry.node} ({entry.reason})", style="yellow")
        for entry in jobs.excluded
    ]
    return Group(*parts)


def _moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))


def _stages(run: Path, config: RunConfig | None, jobs: RunStatus) -> Table:
    table = Table(title=str(run), title_justify="left")
    for heading in ("stage", "state", "job", "how far"):
        table.add_column(heading, overflow="fold")
    by_stage = {job.stage: job for job in jobs.stages}
    table.add_row("prep", _prep_state(run, config), _job(by_stage.get(Stage.PREP)), "")
    for stage in TRAINED:
        status = _of(run, config, stage)
        table.add_row(stage, _state(status), _job(by_stage.get(stage)), _how_far(status))
    scored, others = own_and_others(run)
    state = f"{counted(scored, 'checkpoint')} scored" if scored else "not started"
    apart = "\n".join(f"{number} under {name}" for name, number in others.items())
    table.add_row("eval", state, _job(by_stage.get(Stage.EVAL)), apart)
    return table


def _prep_state(run: Path, config: RunConfig | None) -> str:
    data = config.data_dir if config else RunFolder(run).data
    splits = sorted(path.parent.name for path in data.glob(f"*/{MANIFEST_NAME}"))
    return f"done: {', '.join(splits)}" if splits else "not started" if not data.is_dir() else "unfinished"


def _of(run: Path, config: RunConfig | None, stage: str) -> StageStatus:
    section = getattr(config, stage, None) if config else None
    return stage_status(run / stage, section.training if section else None)


def _job(job: JobStatus | None) -> str:
    if job is None or job.job_id is None:
        return ""
    return f"{job.job_id} {job.state}" + (f" ({job.reason})" if job.reason else "")


def _state(status: StageStatus) -> str:
    if status.state == "silent" and status.seconds_silent is not None:
        return f"silent for {seconds_text(status.seconds_silent)}"
    cause = status.cause if status.cause and status.cause != status.state else None
    return status.state + (f" ({cause})" if cause else "")


def _how_far(status: StageStatus) -> str:
    """Progress, speed and safety, a line each."""
    step, total = status.step, status.total_steps
    first = [_steps(step, total)] if step or total else []
    first += [f"loss {status.loss:.4f}"] if status.loss is not None else []
    second = [f"{status.tokens_per_s:,.0f} tokens/s"] if status.tokens_per_s is not None else []
    second += [f"{seconds_text(status.eta_seconds)} left"] if status.eta_seconds else []
    second += [f"started {status.attempts} times"] if status.attempts > 1 else []
    third = [f"checkpoint at {status.checkpoint_step:,}"] if status.checkpoint_step is not None else []
    if status.next_save_step is not None:
        soon = f" in {seconds_text(status.next_save_seconds)}" if status.next_save_seconds is not None else ""
        third.append(f"next save at {status.next_save_step:,}{soon}")
    return "\n".join(" · ".join(line) for line in (first, second, third) if line)


def _steps(step: int, total: int | None) -> str:
    if total is None:
        return f"step {step:,}"
    return (
        f"step {step:,} of {total:,}"
        if step <= total
        else f"step {step:,} (the configuration asks for {total:,})"
    )
