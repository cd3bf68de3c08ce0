"""How a stage of a run stands, read from its folder alone: no torch, no scheduler, no running process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calm_scale.checkpoint.judge import Entry, inventory, resumable
from calm_scale.config.run_folder import StageFolder
from calm_scale.config.training import TrainingConfig
from calm_scale.record import ledger, rank_times
from calm_scale.record.ledger import Event
from calm_scale.record.metrics import Row, read_metrics
from calm_scale.record.rank_times import Straggler

State = Literal["not started", "running", "silent", "stopped", "finished", "failed"]

SILENT_SECONDS = 300.0
"""An attempt that wrote no end and nothing for this long (or for 20 steps) was probably killed."""
RECENT_ROWS = 50


@dataclass(frozen=True)
class StageStatus:
    """One stage as its folder tells it. None: not known.

    Attributes:
        state: ``running`` wrote lately; ``silent`` wrote neither lately nor an end (killed, or hanging);
            ``stopped`` will go on when started again; ``failed`` needs a person.
        cause: why the last attempt ended, in the ledger's word.
        attempts: lives so far.
        step, total_steps: optimizer steps done and wanted.
        checkpoint_step: newest checkpoint that may be resumed; it got its name only after it was verified.
        next_save_step, next_save_seconds: where the next checkpoint is due, and when at the present pace.
        eta_seconds: to the last step at the present pace (evaluations and saves included).
        seconds_per_step: wall-clock pace of the current attempt.
        seconds_silent: since anything was written.
        stragglers: ranks that are slower than the others, while the stage runs.
        damaged: step folders that are not resumed unasked and unreadable lines of the ledger, with the reason.
    """

    stage: str
    state: State
    cause: str | None = None
    attempts: int = 0
    step: int = 0
    total_steps: int | None = None
    checkpoint_step: int | None = None
    next_save_step: int | None = None
    next_save_seconds: float | None = None
    eta_seconds: float | None = None
    seconds_per_step: float | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    seconds_silent: float | None = None
    stragglers: tuple[Straggler, ...] = ()
    damaged: tuple[str, ...] = ()


def stage_status(
    folder: Path, training: TrainingConfig | None = None, now: float | None = None
) -> StageStatus:
    """Status of ``<workdir>/autoencoder`` or ``<workdir>/lm``.

    Args:
        folder: the stage's folder; it need not exist.
        training: the stage's section where the caller has it; else the newest card's is used.
        now: seconds since the epoch.

    Raises:
        LedgerError: the ledger is of a newer format.
        CheckpointError: the checkpoints folder cannot be read.
    """
    now = time.time() if now is None else now
    book = StageFolder(folder).ledger
    past = ledger.history(book)
    events = past.events
    entries = inventory(StageFolder(folder).checkpoints)
    complete = resumable(entries)
    damaged = tuple(
        f"{entry.path.name}: {entry.reason}"
        for entry in entries
        if entry.state in ("damaged", "suspect", "foreign")
    )
    damaged += (f"{book.name}: {past.damage}",) if past.damage else ()
    if not events and not complete:
        return StageStatus(folder.name, "not started", damaged=damaged)
    newest = next(iter(complete), None)
    training = training or _training_of(newest, folder.name)
    rows = read_metrics(StageFolder(folder).metrics)
    pace = _pace(rows)
    step = max(_step(rows, newest), 0)
    silent = now - _last_sign(folder, events, rows)
    state, cause = _state(events, silent, pace)
    total = training.steps if training else None
    upcoming = _next_save(step, training)
    moving = state == "running" and pace is not None
    slow = rank_times.stragglers(StageFolder(folder).ranks, events[-1].attempt) if moving and events else ()
    return StageStatus(
        stage=folder.name,
        state=state,
        cause=cause,
        attempts=1 + max((event.attempt for event in events), default=-1),
        step=step,
        total_steps=total,
        checkpoint_step=newest.step if newest else None,
        next_save_step=upcoming,
        next_save_seconds=(upcoming - step) * pace if moving and upcoming is not None and pace else None,
        eta_seconds=(total - step) * pace if moving and total is not None and pace else None,
        seconds_per_step=pace,
        tokens_per_s=_number(rows, "tokens_per_s"),
        loss=_number(rows, "loss"),
        seconds_silent=silent,
        stragglers=slow,
        damaged=damaged,
    )


def _training_of(newest: Entry | None, stage: str) -> TrainingConfig | None:
    if newest is None or newest.card is None:
        return None
    section: Any = newest.card.config.get(stage) or newest.card.config.get(newest.card.stage)
    try:
        return TrainingConfig.model_validate(section["training"])
    except (TypeError, KeyError, ValueError):
        return None


def _state(events: Sequence[Event], silent: float, pace: float | None) -> tuple[State, str | None]:
    last = events[-1] if events else None
    if last is None:
        return "stopped", None
    if last.kind != "stop":
        patience = max(SILENT_SECONDS, 20 * (pace or 0.0))
        return ("running" if silent < patience else "silent"), None
    if last.cause == "finished":
        return "finished", last.cause
    goes_on = last.cause in ("signal", "time_limit", "stalled")
    return ("stopped" if goes_on else "failed"), last.cause


def _step(rows: list[Row], newest: Entry | None) -> int:
    return int(rows[-1]["step"]) if rows else newest.step if newest else 0


def _last_sign(folder: Path, events: Sequence[Event], rows: list[Row]) -> float:
    times = [event.time for event in events[-1:]] + [
        float(row["time"]) for row in rows[-1:] if _is_timed(row)
    ]
    if not times:
        times = [path.stat().st_mtime for path in (StageFolder(folder).checkpoints, folder) if path.exists()]
    return max(times, default=0.0)


def _pace(rows: list[Row]) -> float | None:
    """Seconds per step over the latest rows of the latest attempt, everything between them included."""
    latest = rows[-1].get("attempt") if rows else None
    recent = [row for row in rows[-RECENT_ROWS:] if row.get("attempt") == latest and _is_timed(row)]
    if len(recent) < 2:
        seconds = recent[0].get("seconds") if recent else None
        return float(seconds) if isinstance(seconds, int | float) else None
    first, last = recent[0], recent[-1]
    return (float(last["time"]) - float(first["time"])) / max(1, int(last["step"]) - int(first["step"]))


def _is_timed(row: Row) -> bool:
    return isinstance(row.get("time"), int | float)


def _next_save(step: int, training: TrainingConfig | None) -> int | None:
    if training is None or step >= training.steps:
        return None
    interval = training.checkpoint.interval_steps
    return min(training.steps, (step // interval + 1) * interval)


def _number(rows: list[Row], name: str) -> float | None:
    value = rows[-1].get(name) if rows else None
    return float(value) if isinstance(value, int | float) else None
