"""How long before the time limit the ranks must be told: one step, one save and a minute, as measured.

``python -m launchers.slurm.notice LEDGER`` prints it for a job script, which asks at the beginning of every life.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from calm_scale.record.json_lines import read_objects

UNMEASURED_SECONDS = 600
SLACK_SECONDS = 60
BACKSTOP_SECONDS = 180
"""SLURM's own warning is fixed when a job is submitted: the longest it may be where the script keeps the clock."""


def notice_seconds(ledger: Path) -> int:
    """Seconds of notice from a stage's ``ledger.jsonl``: slowest mean step + slowest save + 60; 600 without one.

    The controller looks at time limits every 30 s or so and may warn a minute early: that is the slack.
    """
    step, save = measured(ledger)
    if step is None or save is None:
        return UNMEASURED_SECONDS
    return max(SLACK_SECONDS, math.ceil(step + save + SLACK_SECONDS))


def backstop_seconds(notice: int, limit: str) -> int:
    """Seconds before the limit at which SLURM itself warns: at most :data:`BACKSTOP_SECONDS` and half the limit."""
    return max(1, min(notice, BACKSTOP_SECONDS, limit_seconds(limit) // 2))


def limit_seconds(text: str) -> int:
    """A time limit in seconds, in any of sbatch's forms; ``unlimited`` and 0 are the largest there is.

    ``days-hours[:minutes[:seconds]]``, ``hours:minutes:seconds``, ``minutes[:seconds]``.
    """
    days, dash, rest = text.rpartition("-")
    if not rest.isascii() or not rest.replace(":", "").isdigit():
        return sys.maxsize
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or sys.maxsize


def measured(ledger: Path) -> tuple[float | None, float | None]:
    """(seconds per step, seconds per save), the slowest over the attempts; None where nothing was measured."""
    steps: dict[int, float] = {}
    saves: dict[int, float] = {}
    num_saves: dict[int, int] = {}
    try:
        events = read_objects(ledger)
    except OSError:
        return None, None
    for event in events:
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


if __name__ == "__main__":
    sys.stdout.write(f"{notice_seconds(Path(sys.argv[1]))}\n")
