"""Planned, done and wasted: a run's account from its ledger, attempt by attempt and cumulative over resumes.

MFU and HFU are a share of a stated peak, or a stated reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from calm_scale.accounting.hardware import by_name
from calm_scale.config.errors import CalmScaleError
from calm_scale.record.ledger import Event

ACTIVITIES = ("load", "train", "eval", "save", "stall")


@dataclass(frozen=True)
class AttemptAccount:
    """One attempt. Steps up to the highest one reached before are replays, whatever the attempt believed.

    ``wall`` runs from its first to its last event, what was timed before the first (loading) included. An attempt
    that was killed wrote no ``stop``: its cause is ``killed``, its wall a lower bound. How far it really came is
    known from the metrics its successor read: ``steps_unrecorded`` are the steps after its last line, whose tokens
    and seconds nobody wrote down.
    """

    attempt: int
    job_id: str | None
    cause: str
    first_step: int
    last_step: int
    steps_done: int
    steps_replayed: int
    steps_skipped: int
    steps_unrecorded: int
    samples: int
    tokens: int
    padding_tokens: int
    eval_tokens: int
    wall: float
    seconds: dict[str, float]
    world_size: int
    device: str
    precision: str
    energy_kwh: float | None

    @property
    def steps_progress(self) -> int:
        """Steps that moved the run on: neither replays nor skipped updates."""
        return max(0, self.steps_done - self.steps_replayed - self.steps_skipped)

    @property
    def progress_share(self) -> float:
        """Share of this attempt's steps that moved the run on."""
        return self.steps_progress / self.steps_done if self.steps_done else 0.0

    @property
    def tokens_replayed(self) -> float:
        """Tokens of the replayed steps (all steps of a run are equally long)."""
        return self.tokens * self.steps_replayed / self.steps_done if self.steps_done else 0.0

    @property
    def tokens_skipped(self) -> float:
        """Tokens of steps whose update was discarded."""
        return self.tokens * self.steps_skipped / self.steps_done if self.steps_done else 0.0

    @property
    def device_hours(self) -> float:
        """Devices × wall-clock hours."""
        return self.world_size * self.wall / 3600

    @property
    def useful_seconds(self) -> float:
        """Training seconds of the steps that moved the run on."""
        return self.seconds.get("train", 0.0) * self.progress_share


@dataclass(frozen=True)
class RunAccount:
    """All attempts of one stage."""

    stage: str
    attempts: tuple[AttemptAccount, ...]

    @property
    def steps_reached(self) -> int:
        """Highest step any attempt reached: the progress of the run."""
        return max((a.last_step + a.steps_unrecorded for a in self.attempts), default=0)

    @property
    def tokens(self) -> int:
        """Tokens trained on, replays included."""
        return sum(a.tokens for a in self.attempts)

    @property
    def tokens_progress(self) -> float:
        """Tokens of steps that moved the run on."""
        return sum(a.tokens * a.progress_share for a in self.attempts)

    @property
    def device_hours(self) -> float:
        """Devices × wall-clock hours of all attempts."""
        return sum(a.device_hours for a in self.attempts)

    @property
    def goodput(self) -> float | None:
        """Share of the devices' wall-clock time spent in steps that moved the run on; None without time."""
        hours = self.device_hours
        useful = sum(a.world_size * a.useful_seconds for a in self.attempts) / 3600
        return useful / hours if hours else None

    @property
    def energy_kwh(self) -> float | None:
        """Measured energy; None unless every attempt measured it."""
        known = [a.energy_kwh for a in self.attempts if a.energy_kwh is not None]
        return sum(known) if known and len(known) == len(self.attempts) else None

    def seconds(self, activity: str) -> float:
        """Wall-clock seconds of one activity over all attempts."""
        return sum(a.seconds.get(activity, 0.0) for a in self.attempts)


def accounts(events: Iterable[Event]) -> list[RunAccount]:
    """The accounts of every stage in a ledger, stages in order of first appearance."""
    by_stage: dict[str, list[Event]] = {}
    for event in events:
        by_stage.setdefault(event.stage, []).append(event)
    return [RunAccount(stage, tuple(_attempts(found))) for stage, found in by_stage.items()]


def _attempts(events: Sequence[Event]) -> list[AttemptAccount]:
    by_number = groupby(sorted(events, key=lambda e: e.attempt), key=lambda e: e.attempt)
    groups = [(number, list(group)) for number, group in by_number]
    found, reached = [], 0
    for index, (number, group) in enumerate(groups):
        known_later = groups[index + 1][1][0].highest_step if index + 1 < len(groups) else 0
        account = _attempt(number, group, reached, known_later)
        reached = max(reached, account.last_step + account.steps_unrecorded)
        found.append(account)
    return found


def _attempt(number: int, events: Sequence[Event], reached: int, known_later: int) -> AttemptAccount:
    last = events[-1]
    stop = next((event for event in events if event.kind == "stop"), None)
    first_step = events[0].first_step
    last_step = max(event.step for event in events)
    unrecorded = known_later - last_step if stop is None and known_later > reached else 0
    return AttemptAccount(
        attempt=number,
        job_id=last.job_id,
        cause=(stop.cause or "unknown") if stop else "killed",
        first_step=first_step,
        last_step=last_step,
        steps_done=last.steps_done,
        steps_replayed=max(0, min(last.step, reached) - first_step),
        steps_skipped=last.steps_skipped,
        steps_unrecorded=max(0, unrecorded),
        samples=last.samples,
        tokens=last.tokens,
        padding_tokens=last.padding_tokens,
        eval_tokens=last.eval_tokens,
        wall=last.time - events[0].time + sum(events[0].seconds.values()),
        seconds=dict(last.seconds),
        world_size=last.world_size,
        device=last.device,
        precision=last.precision,
        energy_kwh=last.energy_kwh,
    )


class UtilizationError(CalmScaleError):
    """A utilization above 100 %: time, work or device is wrong, so no number is reported."""


@dataclass(frozen=True)
class Utilization:
    """MFU (model FLOPs) and HFU (with recomputation) as shares of the peak.

    Both are None where there is no peak to relate to; ``basis`` then says why, else it is the peak's source.
    """

    mfu: float | None
    hfu: float | None
    basis: str

    def __str__(self) -> str:
        if self.mfu is None or self.hfu is None:
            return f"MFU unavailable: {self.basis}"
        return f"MFU {100 * self.mfu:.1f} %, HFU {100 * self.hfu:.1f} % of {self.basis}"


def utilization(
    *, model_flops: float, hardware_flops: float, seconds: float, world_size: int, device: str, precision: str
) -> Utilization:
    """Utilization of ``world_size`` devices that did this work in ``seconds`` of training.

    Raises:
        UtilizationError: the result is above 100 %.
    """
    known = by_name(device)
    if known is None:
        return Utilization(None, None, f"no peak is on record for the device '{device}'")
    if precision != "bf16":
        return Utilization(None, None, f"the run is {precision}; the peak on record for {device} is bf16")
    if seconds <= 0:
        return Utilization(None, None, "no training time is on record")
    available = known.peak * world_size * seconds
    mfu, hfu = model_flops / available, hardware_flops / available
    if max(mfu, hfu) > 1:
        raise UtilizationError(
            f"utilization of {100 * max(mfu, hfu):.0f} % on {world_size} × {device}: more work than the peak allows in "
            f"{seconds:.3g} s. Check the ledger's seconds, its world size and the device name"
        )
    return Utilization(mfu, hfu, f"{known.peak / 1e12:g} TFLOP/s ({known.source})")
