"""One attempt of a run: the lock on its folder, the state it resumes from, and its lines in the ledger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from calm_scale.checkpoint.card import Counters, Identity
from calm_scale.checkpoint.diff import resume_diff
from calm_scale.checkpoint.errors import CheckpointError, NothingToResumeError
from calm_scale.checkpoint.run_id import run_id
from calm_scale.checkpoint.store import CheckpointStore, Found
from calm_scale.config import CalmScaleError
from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.config.run_folder import StageFolder
from calm_scale.record import ledger, metrics
from calm_scale.record.json_lines import LineWriter
from calm_scale.record.ledger import Activity, Cause, Event, Kind
from calm_scale.runtime.world import World
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


@dataclass
class Ledger:
    """Writes this attempt's events (first rank only). Counts and seconds are totals of the attempt.

    An event that cannot be written waits in memory; ``warn`` is told.
    """

    attempt: Attempt
    world: World
    stage: str
    precision: str
    warn: Callable[[str], None]
    padding_share: float = 0.0
    first: Counters = field(default_factory=Counters)
    counters: Counters = field(default_factory=Counters)
    eval_tokens: int = 0
    _seconds: dict[Activity, float] = field(default_factory=dict)
    _last: float = 0.0

    def __post_init__(self) -> None:
        self._lines = LineWriter(StageFolder(self.attempt.folder).ledger, self.warn, durable=True)

    @contextlib.contextmanager
    def timing(self, activity: Activity) -> Iterator[None]:
        """The block's wall-clock seconds count as this activity."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[activity] = self._seconds.get(activity, 0.0) + time.monotonic() - start

    def seconds(self, activity: Activity) -> float:
        """Seconds of this attempt so far."""
        return self._seconds.get(activity, 0.0)

    def write(self, kind: Kind, cause: Cause | None = None) -> None:
        """One event with the totals of now."""
        self._last = time.monotonic()
        if not self.world.is_first:
            return
        first, now = self.first, self.counters
        done = now.steps - first.steps
        event = Event(
            kind=kind,
            attempt=self.attempt.number,
            stage=self.stage,
            step=now.steps,
            time=time.time(),
            job_id=environment.facts().job_id,
            cause=cause,
            first_step=first.steps,
            highest_step=self.attempt.highest_step,
            steps_done=done,
            steps_replayed=max(0, min(now.steps, self.attempt.highest_step) - first.steps),
            steps_skipped=now.skipped_steps - first.skipped_steps,
            samples=now.samples - first.samples,
            tokens=now.tokens - first.tokens,
            padding_tokens=round((now.tokens - first.tokens) * self.padding_share),
            eval_tokens=self.eval_tokens,
            seconds={str(name): spent for name, spent in self._seconds.items()},
            world_size=self.world.world_size,
            device=device_name(self.world),
            precision=self.precision,
        )
        self._lines.add(ledger.line_of(event))

    def progress(self) -> None:
        """A progress event, if the last event is a while ago."""
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self.write("progress")


def device_name(world: World) -> str:
    """What torch calls this rank's device."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def resume(
    engine: Engine,
    store: CheckpointStore,
    identity: Identity,
    say: Callable[[str], None],
    accept: Sequence[str] = (),
    step: int | None = None,
    fresh: bool = False,
) -> Found | None:
    """Loads the newest complete checkpoint (or ``step``) into the engine. None: nothing there, a new run.

    Args:
        accept: fields whose change may change results.
        fresh: insist on starting from step 0.

    Raises:
        NothingToResumeError: checkpoints that cannot be used, or ``fresh`` and there are some.
        ResumeRefusedError: it is another run's, or the configuration changed in a way that needs a word.
    """
    found = store.newest(step)
    if found is None:
        return None
    if fresh:
        raise NothingToResumeError(
            f"asked for a fresh start, but {store.root} holds {found.path.name}. Move the folder away, or resume"
        )
    diff = store.world.on_first(  # one verdict: another node may not see the same tokenizer file
        lambda: resume_diff(found.card, identity.config, identity.stage, identity.fingerprints)
    )
    for change in diff.of("safe"):
        say(f"resuming with a changed field: {change.text()}")
    diff.check(accept)
    for change in diff.of("results"):
        say(f"resuming with a changed field: {change.text(accept)}")
    store.world.everywhere(lambda: _load(engine, found))
    same = found.card.topology == identity.topology
    say(f"resumed at step {found.step} from {found.path.name}" + ("" if same else _layouts(found, identity)))
    return found


def _load(engine: Engine, found: Found) -> None:
    try:
        engine.load(found.shards)
    except Exception as error:
        raise CheckpointError(
            f"{found.path} is whole, but the engine cannot load it: {type(error).__name__}: {error}"
        ) from error


def counters_of(found: Found | None) -> Counters:
    """Where to go on counting."""
    return found.card.counters if found is not None else Counters()


def _layouts(found: Found, identity: Identity) -> str:
    def text(topology: dict[str, object]) -> str:
        return ", ".join(f"{key} {value}" for key, value in topology.items())

    return f", written by ({text(found.card.topology)}), now ({text(identity.topology)})"
