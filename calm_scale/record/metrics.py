"""``metrics.jsonl``: the record of a run. One row per step; where a step was done twice, the later attempt wins.

Rows are appended, so nothing that happened is lost. A ``resume`` line says that an attempt went on from an older
step: rows of later steps that stand above it belong to a life that was rolled back. ``read_metrics`` applies this.
Imports no torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calm_scale.record.json_lines import LineWriter, read_objects

Row = dict[str, Any]


class MetricsRecord:
    """Appends rows. What cannot be written waits in memory (``LineWriter``): a record never ends a run.

    Args:
        path: the file.
        attempt: goes into every row.
        warn: told when rows cannot be written, and when they can again.
    """

    def __init__(self, path: Path, attempt: int, warn: Callable[[str], None]) -> None:
        self.attempt = attempt
        self._lines = LineWriter(path, warn)

    def resume(self, step: int) -> None:
        """This attempt goes on after ``step``; what stands above for later steps no longer counts."""
        self._write({"resume": step, "attempt": self.attempt, "time": time.time()})

    def row(self, row: Row) -> None:
        """One step's numbers; ``row`` has ``step``."""
        self._write(storable(row) | {"attempt": self.attempt})

    def sync(self) -> None:
        """Makes the rows durable: called before a checkpoint that relies on them is committed."""
        self._lines.sync()

    def close(self) -> None:
        """A last try for what waits."""
        self._lines.close()

    def _write(self, value: Row) -> None:
        self._lines.add(json.dumps(value, allow_nan=False))


def storable(row: Row) -> Row:
    """The row as JSON can hold it: numbers that are not finite are null, and named in ``nonfinite``."""
    bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    return {k: None if k in bad else v for k, v in row.items()} | ({"nonfinite": bad} if bad else {})


def read_metrics(path: Path) -> list[Row]:
    """The rows that count, one per step, in step order. Damaged lines are passed over. Empty when there is no file."""
    rows: dict[int, Row] = {}
    for value in read_objects(path):
        if isinstance(value.get("resume"), int):
            rows = {step: row for step, row in rows.items() if step <= value["resume"]}
        elif isinstance(value.get("step"), int):
            rows[value["step"]] = value
    return [rows[step] for step in sorted(rows)]


def highest_step(path: Path) -> int:
    """The highest step any attempt has a row for, rolled back or not; 0 without any."""
    return max((v["step"] for v in read_objects(path) if isinstance(v.get("step"), int)), default=0)


def next_attempt(path: Path) -> int:
    """One more than the highest attempt that has a line; 0 without any."""
    return 1 + max(
        (v["attempt"] for v in read_objects(path) if isinstance(v.get("attempt"), int)), default=-1
    )
