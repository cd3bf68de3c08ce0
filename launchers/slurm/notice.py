"""How long before the time limit the ranks must be told: one step, one save and a minute, as measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

UNMEASURED_SECONDS = 600
SLACK_SECONDS = 60


def notice_seconds(ledger: Path) -> int:
    """Seconds of notice from a stage's ``ledger.jsonl``: slowest mean step + slowest save + 60; 600 without one.

    The controller looks at time limits every 30 s or so and may warn a minute early: that is the slack.
    """
    step, save = measured(ledger)
    if step is None or save is None:
        return UNMEASURED_SECONDS
    return max(SLACK_SECONDS, math.ceil(step + save + SLACK_SECONDS))


def measured(ledger: Path) -> tuple[float | None, float | None]:
    """(seconds per step, seconds per save), the slowest over the attempts; None where nothing was measured."""
    steps: dict[int, float] = {}
    saves: dict[int, float] = {}
    num_saves: dict[int, int] = {}
    for event in _events(ledger):
        attempt, seconds = event.get("attempt"), event.get("seconds")
        if not isinstance(attempt, int) or not isinstance(seconds, dict):
            continue
        if event.get("kind") == "save":
            num_saves[attempt] = num_saves.get(attempt, 0) + 1
        if event.get("steps_done"):
            steps[attempt] = float(seconds.get("train", 0.0)) / int(event["steps_done"])
        if num_saves.get(attempt) and seconds.get("save"):
            saves[attempt] = float(seconds["save"]) / num_saves[attempt]
    return max(steps.values(), default=None), max(saves.values(), default=None)


def _events(ledger: Path) -> list[dict[str, Any]]:
    """The readable lines; a line torn by a kill is passed over."""
    found = []
    try:
        lines = ledger.read_bytes().split(b"\n")
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line) if line.strip() else None
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
