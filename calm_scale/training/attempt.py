"""One attempt of a run: what it is made of, the lock on its folder, and its lines in the ledger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from calm_scale.checkpoint.card import Counters, Identity
from calm_scale.checkpoint.judge import run_id
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import CalmScaleError
from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.config.run_folder import StageFolder
from calm_scale.config.training import TrainingConfig
from calm_scale.record import ledger, metrics
from calm_scale.record.json_lines import LineWriter
from calm_scale.record.ledger import Activity, Cause, Event, Kind
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.watchdog import Watchdog
from calm_scale.runtime.world import World
from calm_scale.training.batches import EvaluationBatches, TrainingBatches
from calm_scale.training.engine import Engine
from launchers import environment

PATIENCE_SECONDS = 20.0
"""How long the ranks of a training that has just been killed may take to disappear."""


class FolderInUseError(CalmScaleError):
    """Another training holds the folder."""

    may_pass = True


@contextlib.contextmanager
def claimed(folder: Path, world: World, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds the stage's folder for this training. Every rank calls it; the first rank holds the lock.

    What a killed training leaves is taken over, on another machine once it gave no sign of life for
    ``exclusive.STALE_SECONDS``.

    Raises:
        FolderInUseError: another training still holds it after ``patience`` seconds; says which.
    """
    with contextlib.ExitStack() as held:
        world.on_first(lambda: _take(folder, patience, held))
        yield


def _take(folder: Path, patience: float, held: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(exclusive(StageFolder(folder).lock, patience=patience))
    except OccupiedError as error:
        raise FolderInUseError(
            f"{folder} is being trained by {error.holder}: two at once would overwrite each other's checkpoints. "
            "Wait for it, stop it, or give this run another workdir"
        ) from None


PROGRESS_SECONDS = 30.0
"""A killed attempt is known up to its last progress line."""


@dataclass(frozen=True)
class Attempt:
    """Which life of which run this is; the same on every rank. ``damage``: what of its ledger is unreadable."""

    folder: Path
    run_id: str
    number: int
    highest_step: int
    damage: str = ""


def open_attempt(folder: Path, name: str, world: World) -> Attempt:
    """Looks up the run of a stage's folder (``<workdir>/lm``) and counts its earlier attempts. Every rank calls it."""

    def look_up() -> Attempt:
        book, record = StageFolder(folder).ledger, StageFolder(folder).metrics
        past = ledger.history(book)
        reached = max(ledger.highest_step(past), metrics.highest_step(record))
        number = max(ledger.next_attempt(past), metrics.next_attempt(record) if past.damaged else 0)
        damage = f"{book}: {past.damage}" if past.damage else ""
        return Attempt(folder, run_id(folder, name), number, reached, damage)

    return world.on_first(look_up)


@dataclass(frozen=True)
class TrainingData:
    """What to train on, and what to evaluate on every ``eval_interval`` steps.

    ``padding_share``: padding among the training tokens, for the account of what was wasted.
    """

    train: TrainingBatches
    evaluation: EvaluationBatches | None = None
    padding_share: float = 0.0


@dataclass(frozen=True)
class Training:
    """One attempt of one stage on this rank.

    Attributes:
        store: where checkpoints go; its newest complete one is resumed.
        identity: goes into every card and is compared with the resumed one.
        attempt: from ``open_attempt``.
    """

    engine: Engine
    data: TrainingData
    config: TrainingConfig
    store: CheckpointStore
    telemetry: Telemetry
    world: World
    identity: Identity
    attempt: Attempt


@dataclass(frozen=True)
class Start:
    """How to start, as the caller asked.

    Attributes:
        accept: changed fields that may change results.
        resume_step: resume this step instead of the newest, even a suspect one.
    """

    accept: Sequence[str] = ()
    resume_step: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. ``exit_code`` is for the process: 0 finished, 75 put it back into the queue."""

    step: int
    cause: Cause
    exit_code: int
    resumed_at: int | None = None
    last_row: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """Writes this attempt's events (first rank only) and keeps the time. Counts and seconds are totals of the attempt.

    An event that cannot be written waits in memory; the telemetry warns of it.

    Attributes:
        first, counters: what the attempt began with, and has reached.
        eval_tokens: tokens of its evaluations.
    """

    def __init__(self, training: Training, watchdog: Watchdog) -> None:
        self.first = self.counters = Counters()
        self.eval_tokens = 0
        self._training, self._watchdog = training, watchdog
        self._seconds: dict[Activity, float] = {}
        self._last = 0.0
        path = StageFolder(training.attempt.folder).ledger
        self._lines = LineWriter(path, training.telemetry.warn, durable=True)
        if training.attempt.damage:
            training.telemetry.warn(training.attempt.damage)

    @contextlib.contextmanager
    def phase(
        self, operation: str, activity: Activity | None = None, limit_seconds: float | None = None
    ) -> Iterator[None]:
        """The block is one operation for the watchdog, with a limit of its own, and its seconds are the activity's."""
        start = time.monotonic()
        try:
            with self._watchdog.doing(operation, limit_seconds):
                yield
        finally:
            if activity is not None:
                self._seconds[activity] = self._seconds.get(activity, 0.0) + time.monotonic() - start

    def write(self, kind: Kind, cause: Cause | None = None) -> None:
        """One event with the totals of now."""
        self._last = time.monotonic()
        training, first, now = self._training, self.first, self.counters
        attempt, world = training.attempt, training.world
        if not world.is_first:
            return
        tokens = now.tokens - first.tokens
        event = Event(
            kind=kind,
            attempt=attempt.number,
            stage=training.identity.stage,
            step=now.steps,
            time=time.time(),
            job_id=environment.facts().job_id,
            cause=cause,
            first_step=first.steps,
            highest_step=attempt.highest_step,
            steps_done=now.steps - first.steps,
            steps_replayed=max(0, min(now.steps, attempt.highest_step) - first.steps),
            steps_skipped=now.skipped_steps - first.skipped_steps,
            samples=now.samples - first.samples,
            tokens=tokens,
            padding_tokens=round(tokens * training.data.padding_share),
            eval_tokens=self.eval_tokens,
            seconds={str(name): spent for name, spent in self._seconds.items()},
            world_size=world.world_size,
            device=device_name(world),
            precision=training.config.precision,
        )
        self._lines.add(ledger.line_of(event))

    def progress(self) -> None:
        """A progress event, if the last event is a while ago."""
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self.write("progress")


def device_name(world: World) -> str:
    """What torch calls this rank's device."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
