"""The lives of a run, a line each: what an attempt did, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

from calm_scale.accounting.goodput import AttemptAccount, RunAccount
from calm_scale.accounting.report.document import Cell, Column, Table
from calm_scale.accounting.utilization import utilization

_SPENT = ("progress", "replay", "eval", "save", "stall", "load", "other")


@dataclass(frozen=True)
class StageCosts:
    """FLOPs per token of a stage, and what was planned."""

    training: float
    hardware: float
    evaluation: float
    planned_steps: int
    planned_tokens: int


def attempts_table(account: RunAccount, costs: StageCosts) -> Table:
    """Steps, speed and utilization of every attempt."""
    columns = (
        Column("attempt", "Attempt", "integer"),
        Column("job", "Job"),
        Column("cause", "Ended"),
        Column("steps", "Steps"),
        Column("progress", "New", "integer"),
        Column("replayed", "Replayed", "integer"),
        Column("skipped", "Skipped", "integer"),
        Column("unrecorded", "Unrecorded", "integer"),
        Column("world", "Ranks", "integer"),
        Column("wall", "Wall", "seconds"),
        Column("train", "Training", "seconds"),
        Column("tokens_per_second", "Tokens/s", "number"),
        Column("mfu", "MFU", "percent"),
        Column("hfu", "HFU", "percent"),
    )
    rows = tuple(_attempt_cells(attempt, costs) for attempt in account.attempts)
    note = (
        "Tokens/s over the training time of an attempt. Replayed steps had been reached by an earlier attempt; "
        "unrecorded ones ran after the last line of a killed attempt."
    )
    return Table(f"attempts_{account.stage}", f"{account.stage}: attempts", columns, rows, note=note)


def _attempt_cells(attempt: AttemptAccount, costs: StageCosts) -> tuple[Cell, ...]:
    seconds = attempt.seconds.get("train", 0.0)
    used = utilization(
        model_flops=costs.training * attempt.tokens,
        hardware_flops=costs.hardware * attempt.tokens,
        seconds=seconds,
        world_size=attempt.world_size,
        device=attempt.device,
        precision=attempt.precision,
    )
    return (
        attempt.attempt,
        attempt.job_id or "local",
        attempt.cause,
        f"{attempt.first_step} → {attempt.last_step}",
        attempt.steps_progress,
        attempt.steps_replayed,
        attempt.steps_skipped,
        attempt.steps_unrecorded,
        attempt.world_size,
        attempt.wall,
        seconds,
        attempt.tokens / seconds if seconds else None,
        used.mfu,
        used.hfu,
    )


def time_table(account: RunAccount) -> Table:
    """What every attempt did with its wall-clock time, and what it did for nothing."""
    headings = {
        "progress": "Progress",
        "replay": "Replayed",
        "eval": "Evaluation",
        "save": "Saves",
        "stall": "Stalls",
        "load": "Loading",
        "other": "Start-up, other",
    }
    columns = (
        Column("attempt", "Attempt", "integer"),
        Column("job", "Job"),
        Column("wall", "Wall", "seconds"),
        *(Column(kind, headings[kind], "seconds") for kind in _SPENT),
        Column("goodput", "Goodput", "percent"),
        Column("padding", "Padding tokens", "number"),
        Column("device_hours", "Device-hours", "number"),
    )
    rows = tuple(
        (
            attempt.attempt,
            attempt.job_id or "local",
            attempt.wall,
            *(spent[kind] for kind in _SPENT),
            attempt.useful_seconds / attempt.wall if attempt.wall else None,
            attempt.padding_tokens,
            attempt.device_hours,
        )
        for attempt, (_, spent) in zip(account.attempts, time_spent(account), strict=True)
    )
    note = "Progress is the training time of steps that moved the run on; stalls are waits for data."
    return Table(f"time_{account.stage}", f"{account.stage}: where the time went", columns, rows, note=note)


def time_spent(account: RunAccount) -> list[tuple[str, dict[str, float]]]:
    """Seconds of every attempt by what they were for."""
    found = []
    for attempt in account.attempts:
        useful = attempt.useful_seconds
        spent = {kind: attempt.seconds.get(kind, 0.0) for kind in ("eval", "save", "stall", "load")}
        train = attempt.seconds.get("train", 0.0)
        other = max(0.0, attempt.wall - train - sum(spent.values()))
        spent |= {"progress": useful, "replay": train - useful, "other": other}
        found.append((str(attempt.attempt), spent))
    return found
