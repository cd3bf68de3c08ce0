"""The ledger of a run: one JSON line per event, appended by the training loop, read by the goodput account.

An *attempt* is one process group's life, from start to stop: a SLURM job, a requeue of it, or a local launch.
Every event carries the attempt's number, so a killed attempt (which writes no ``stop``) still counts up to its
last ``progress``. Seconds and counts in ``progress`` and ``stop`` are totals *of the attempt so far*, never
increments: a lost line loses nothing. Events are written by one rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from calm_scale.config.errors import CalmScaleError
from calm_scale.record.json_lines import read_lines

FORMAT_VERSION = 1
_FAR = 1e15
"""No time and no duration in seconds gets there."""

Kind = Literal["start", "progress", "eval", "save", "stop"]
Activity = Literal["load", "train", "eval", "save", "stall"]
Cause = Literal["finished", "signal", "time_limit", "stalled", "nonfinite", "error", "disk_full", "unknown"]
KINDS: tuple[Kind, ...] = ("start", "progress", "eval", "save", "stop")


class LedgerError(CalmScaleError):
    """A ledger of which nothing can be read, or of a newer format; names the file."""


@dataclass(frozen=True)
class Event:
    """One line of ``ledger.jsonl``.

    Attributes:
        kind: what happened.
        attempt: number of the attempt, from 0, in order of their starts.
        stage: ``autoencoder`` or ``lm``.
        step: optimizer steps completed when the event was written (the global step count, replays included).
        time: seconds since the epoch.
        job_id: SLURM job id, None outside SLURM.
        cause: why the attempt stopped (``stop`` only).
        first_step: step count the attempt resumed from (0 for a fresh run).
        highest_step: highest step any earlier attempt had reached; steps up to it are replays, not progress.
        steps_done: optimizer steps this attempt ran, replays included.
        steps_replayed: those of them that an earlier attempt had already run.
        steps_skipped: steps whose update was discarded (non-finite gradients).
        samples: sequences trained on in this attempt.
        tokens: tokens trained on in this attempt, padding included.
        padding_tokens: padding among them.
        eval_tokens: tokens scored by in-loop evaluation in this attempt.
        seconds: wall-clock seconds of this attempt by activity.
        world_size: ranks.
        device: device name as torch reports it, ``cpu`` without an accelerator.
        precision: ``fp32`` or ``bf16``.
        energy_kwh: energy used by this attempt where it was measured.
    """

    kind: Kind
    attempt: int
    stage: str
    step: int
    time: float
    job_id: str | None = None
    cause: Cause | None = None
    first_step: int = 0
    highest_step: int = 0
    steps_done: int = 0
    steps_replayed: int = 0
    steps_skipped: int = 0
    samples: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    eval_tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    device: str = "cpu"
    precision: str = "fp32"
    energy_kwh: float | None = None


@dataclass(frozen=True)
class History:
    """What a ledger holds.

    Attributes:
        events: the readable lines in order.
        damaged: numbers of the lines that are no events, counted from 1. The line that a killed attempt tore (the
            last one, or the one before the next attempt's ``start``) is not among them: it loses nothing.
    """

    events: tuple[Event, ...]
    damaged: tuple[int, ...] = ()

    @property
    def damage(self) -> str:
        """The damage in words, without the file's name; empty where there is none."""
        if not self.damaged:
            return ""
        several = len(self.damaged) > 1
        shown = ", ".join(map(str, self.damaged[:8])) + (", …" if len(self.damaged) > 8 else "")
        return (
            f"{len(self.damaged)} unreadable line{'s' if several else ''} ({shown}); what only "
            f"{'they' if several else 'it'} recorded is missing from the account"
        )


def line_of(event: Event) -> str:
    """The event as a line, without its newline."""
    return json.dumps({"version": FORMAT_VERSION, **dataclasses.asdict(event)}, allow_nan=False)


def history(path: Path) -> History:
    """All events in order; lines that are none are passed over and named. Empty when there is no file.

    Raises:
        LedgerError: a line of a newer format; names file and line.
    """
    events: list[Event] = []
    damaged: list[int] = []
    torn: int | None = None
    for number, value in read_lines(path):
        event = _read_event(value, f"{path}:{number}")
        if torn is not None and (event is None or event.kind != "start"):
            damaged.append(torn)
        torn = None
        if event is not None:
            events.append(event)
        elif value is None:
            torn = number
        else:
            damaged.append(number)
    return History(tuple(events), tuple(damaged))


def next_attempt(past: History) -> int:
    """Number of the attempt that starts now."""
    return 1 + max((event.attempt for event in past.events), default=0 if past.damaged else -1)


def highest_step(past: History) -> int:
    """Highest step count any attempt has reached; 0 for a new run."""
    return max((event.step for event in past.events), default=0)


def _read_event(value: Any, where: str) -> Event | None:
    """The event that the value says; None where it says none."""
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        return None
    version = value.pop("version", FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise LedgerError(f"{where}: ledger format {version}, this program reads up to {FORMAT_VERSION}")
    try:
        event = Event(**value)
    except TypeError:  # a field is unknown or missing
        return None
    sound = all(_fits(getattr(event, f.name), str(f.type)) for f in dataclasses.fields(Event))
    return event if sound and version == FORMAT_VERSION else None


def _fits(value: Any, kind: str) -> bool:
    if kind == "int":
        return isinstance(value, int) and value >= 0
    if kind == "float" or (kind == "float | None" and value is not None):
        return isinstance(value, int | float) and abs(value) < _FAR  # false for NaN
    if kind == "Mapping[str, float]":
        return isinstance(value, dict) and all(_fits(item, "float") for item in value.values())
    return isinstance(value, str) or (value is None and kind != "str")
