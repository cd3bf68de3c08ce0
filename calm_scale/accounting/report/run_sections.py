"""What runs did: planned, done and wasted, attempt by attempt, from their ledgers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calm_scale.accounting.costs import (
    autoencoder_tokens,
    autoencoder_training_per_token,
    evaluation_per_token,
    token_costs,
    tokens_per_step,
)
from calm_scale.accounting.goodput import AttemptAccount, RunAccount, Utilization, accounts, utilization
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Cell, Column, Section, Table
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import TRAINED, RunFolder, Stage
from calm_scale.record import ledger
from calm_scale.record.ledger import History, LedgerError


@dataclass(frozen=True)
class Prices:
    """What a site pays; None leaves the line out."""

    dollars_per_device_hour: float | None = None
    watts_per_device: float | None = None


def run_section(config: RunConfig, folder: Path, prices: Prices) -> Section:
    """The account of every stage that has a ledger."""
    title = f"{config.name}: planned, done, wasted"
    books = [(stage, _history(RunFolder(folder).stage(stage).ledger)) for stage in TRAINED]
    found = [
        account
        for _, past in books
        for account in accounts(past.events)
        if _costs(config, account.stage) is not None
    ]
    text = [f"{stage}: ledger.jsonl has {past.damage}." for stage, past in books if past.damage]
    if not found:
        return Section(
            f"run.{config.name}", title, (f"{folder} holds no ledger: nothing has been run there.",)
        )
    tables, drawn = [], []
    for account in found:
        costs = _costs(config, account.stage)
        if costs is None:
            continue
        used = _utilization(account, costs)
        text.append(f"{account.stage}: {_headline(account)} {used}.")
        tables += [_balance(account, costs, prices), attempts_table(account, costs), time_table(account)]
        drawn.append(pictures.time_spent(f"{config.name} {account.stage}", time_spent(account)))
    return Section(f"run.{config.name}", title, tuple(text), tuple(tables), tuple(drawn))


def _history(path: Path) -> History:
    past = ledger.history(path)
    if past.damaged and not past.events:
        raise LedgerError(f"{path}: {past.damage}. Nothing is left to report; restore it or move it away")
    return past


def _costs(config: RunConfig, stage: str) -> StageCosts | None:
    if stage == Stage.AUTOENCODER and config.autoencoder is not None:
        each, section = autoencoder_training_per_token(config), config.autoencoder
        planned = autoencoder_tokens(config, section)
        return StageCosts(each, each, each / 3, section.training.steps, planned)
    if stage == Stage.LM and config.lm is not None:
        costs, steps = token_costs(config), config.lm.training.steps
        planned = steps * tokens_per_step(config)
        return StageCosts(costs.training, costs.hardware, evaluation_per_token(config), steps, planned)
    return None


def _headline(account: RunAccount) -> str:
    goodput = "no time on record" if account.goodput is None else f"goodput {100 * account.goodput:.1f} %"
    plural = "" if len(account.attempts) == 1 else "s"
    return f"{len(account.attempts)} attempt{plural}, step {account.steps_reached} reached, {goodput}."


def _utilization(account: RunAccount, costs: StageCosts) -> Utilization:
    """Over all attempts; they must agree on device and precision to be put in one number."""
    kinds = {(a.device, a.precision) for a in account.attempts}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{device} in {precision}" for device, precision in kinds))
        return Utilization(None, None, f"attempts ran on different devices ({names}); see each of them")
    (device, precision), tokens = kinds.pop(), account.tokens
    return utilization(
        model_flops=costs.training * tokens,
        hardware_flops=costs.hardware * tokens,
        seconds=sum(a.world_size * a.seconds.get("train", 0.0) for a in account.attempts),
        world_size=1,
        device=device,
        precision=precision,
    )


def _balance(account: RunAccount, costs: StageCosts, prices: Prices) -> Table:
    attempts = account.attempts
    replayed = sum(a.tokens_replayed for a in attempts)
    skipped = sum(a.tokens_skipped for a in attempts)
    padding = sum(a.padding_tokens * a.progress_share for a in attempts)
    evaluated = sum(a.eval_tokens for a in attempts)
    hours = {kind: _device_hours(account, kind) for kind in ("train", "eval", "save", "stall", "load")}
    other = account.device_hours - sum(hours.values())
    per_token_hours = hours["train"] / account.tokens if account.tokens else 0.0
    reached = account.tokens_progress
    rows: list[tuple[Cell, ...]] = [
        ("planned", costs.planned_steps, costs.planned_tokens, costs.planned_tokens * costs.training, None),
        ("progress", account.steps_reached, reached, reached * costs.training, reached * per_token_hours),
        ("  of it padding", None, padding, padding * costs.training, padding * per_token_hours),
        (
            "wasted: replayed steps",
            sum(a.steps_replayed for a in attempts),
            replayed,
            replayed * costs.training,
            replayed * per_token_hours,
        ),
        (
            "wasted: skipped updates",
            sum(a.steps_skipped for a in attempts),
            skipped,
            skipped * costs.training,
            skipped * per_token_hours,
        ),
        ("evaluation", None, evaluated, evaluated * costs.evaluation, hours["eval"]),
        ("saves", None, None, None, hours["save"]),
        ("stalls (waiting for data)", None, None, None, hours["stall"]),
        ("loading", None, None, None, hours["load"]),
        ("start-up and other", None, None, None, other),
        ("executed, model FLOPs", None, account.tokens, account.tokens * costs.training, None),
        (
            "executed, hardware FLOPs",
            None,
            account.tokens,
            account.tokens * costs.hardware,
            account.device_hours,
        ),
    ]
    columns = (
        Column("what", f"{account.stage}"),
        Column("steps", "Steps", "integer"),
        Column("tokens", "Tokens", "number"),
        Column("flops", "FLOPs", "flops"),
        Column("device_hours", "Device-hours", "number"),
    )
    return Table(
        f"balance_{account.stage}",
        f"{account.stage}: planned, done, wasted (cumulative over attempts)",
        columns,
        tuple(rows),
        note=_bill(account, prices),
        num_total=2,
    )


def _bill(account: RunAccount, prices: Prices) -> str:
    hours, kwh = account.device_hours, account.energy_kwh
    parts = [f"{hours:.3g} device-hours"]
    if kwh is not None:
        parts.append(f"{kwh:.3g} kWh measured")
    elif prices.watts_per_device is not None:
        parts.append(
            f"{hours * prices.watts_per_device / 1000:.3g} kWh at {prices.watts_per_device:g} W a device"
        )
    if prices.dollars_per_device_hour is not None:
        price = prices.dollars_per_device_hour
        parts.append(f"${hours * price:.2f} at ${price:g} a device-hour")
    return ", ".join(parts) + "."


def _device_hours(account: RunAccount, activity: str) -> float:
    return sum(a.world_size * a.seconds.get(activity, 0.0) for a in account.attempts) / 3600


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
