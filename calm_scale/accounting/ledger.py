"""The ledger of a run: one JSON line per event, appended by the training loop, read by the goodput account.

An *attempt* is one process group's life, from start to stop: a SLURM job, a requeue of it, or a local launch.
Every event carries the attempt's number, so a killed attempt (which writes no ``stop``) still counts up to its
last ``progress``. Seconds and counts in ``progress`` and ``stop`` are totals *of the attempt so far*, never
increments: a lost line loses nothing. Events are written by one rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from calm_scale.config.base import CalmScaleError

FORMAT_VERSION = 1

Kind = Literal["start", "progress", "eval", "save", "stop"]
Activity = Literal["load", "train", "eval", "save", "stall"]
Cause = Literal["finished", "signal", "time_limit", "stalled", "nonfinite", "error", "disk_full", "unknown"]
KINDS: tuple[Kind, ...] = ("start", "progress", "eval", "save", "stop")


class LedgerError(CalmScaleError):
    """A ledger that cannot be read; names file and line."""


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


def append(path: Path, event: Event) -> None:
    """Append one event as one line and flush it to the disk, so that a killed attempt leaves its history.

    A line torn by a crash (no newline at the end of the file) is closed first, so that it spoils no other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"version": FORMAT_VERSION, **dataclasses.asdict(event)}, allow_nan=False)
    with path.open("a+b") as file:
        torn = file.seek(0, os.SEEK_END) > 0 and _last_byte(path) != b"\n"
        file.write((b"\n" if torn else b"") + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Event]:
    """All events in order.

    A line that a killed attempt tore (the last one, or the one before the next attempt's ``start``) is passed
    over. Any other damage is an error: a history with holes would be read as less waste than there was.

    Raises:
        LedgerError: a line that is not an event, or a newer format; names file and line.
    """
    events: list[Event] = []
    torn: int | None = None
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError:  # includes bytes cut inside a character
            if torn is not None:
                raise _damaged(path, torn) from None
            torn = number
            continue
        event = _event(raw, f"{path}:{number}")
        if torn is not None and event.kind != "start":
            raise _damaged(path, torn)
        torn = None
        events.append(event)
    return events


def next_attempt(path: Path) -> int:
    """Number of the attempt that starts now."""
    return 1 + max((event.attempt for event in read(path)), default=-1) if path.exists() else 0


def highest_step(path: Path) -> int:
    """Highest step count any attempt has reached; 0 for a new run."""
    return max((event.step for event in read(path)), default=0) if path.exists() else 0


def _damaged(path: Path, number: int) -> LedgerError:
    return LedgerError(
        f"{path}:{number}: damaged line inside an attempt; restore the file from a copy or delete that line "
        "(its attempt is then accounted from its other lines)"
    )


def _event(raw: Any, where: str) -> Event:
    if not isinstance(raw, dict) or raw.get("kind") not in KINDS:
        raise LedgerError(f"{where}: not a ledger event (kind must be one of {', '.join(KINDS)})")
    version = raw.pop("version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise LedgerError(f"{where}: ledger format {version}, this program reads up to {FORMAT_VERSION}")
    known = {f.name for f in dataclasses.fields(Event)}
    if unknown := sorted(set(raw) - known):
        raise LedgerError(f"{where}: unknown fields {', '.join(unknown)}")
    try:
        return Event(**raw)
    except TypeError as error:
        raise LedgerError(f"{where}: {error}") from None


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
