"""One progress line per run, and the same numbers as a machine-readable log."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.worker import total_progress

LOG_NAME = "prep.log.jsonl"
_POLL_SECONDS = 0.5
_LOG_SECONDS = 5.0
_PLAIN_SECONDS = 30.0


class ProgressLine:
    """Shows and logs the sum over all workers while the ``with`` block runs."""

    def __init__(self, plan: Plan, journal: Journal, task: str, *, show: bool) -> None:
        self._plan, self._journal, self._task, self._show = plan, journal, task, show
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self._console = Console(file=sys.stderr)

    def __enter__(self) -> ProgressLine:
        log_event(
            self._journal.data_dir,
            "start",
            task=self._task,
            plan=self._plan.key,
            text_bytes=self._plan.text_bytes,
        )
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._stop.set()
        self._thread.join()
        event = "workers done" if kind is None else "failed"
        log_event(
            self._journal.data_dir,
            event,
            **self._numbers(),
            **({"error": str(error) or kind.__name__} if kind else {}),
        )

    def _numbers(self) -> dict[str, Any]:
        return asdict(total_progress(self._journal.attempt_dir / "progress", self._task))

    def _run(self) -> None:
        columns = (
            TextColumn(f"prep · {self._task}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        terminal = self._show and self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not terminal) as bar:
            task = bar.add_task(
                "prep", total=max(1, self._plan.text_bytes) if self._plan.text_bytes else None, numbers=""
            )
            logged = told = time.monotonic()
            while not self._stop.wait(_POLL_SECONDS):
                numbers = self._numbers()
                line = self._line(numbers)
                bar.update(task, completed=numbers["text_bytes"], numbers=line)
                now = time.monotonic()
                if now - logged >= _LOG_SECONDS:
                    logged = now
                    log_event(self._journal.data_dir, "progress", **numbers)
                if self._show and not terminal and now - told >= _PLAIN_SECONDS:
                    told = now
                    self._console.print(f"prep: {line}", highlight=False)

    def _line(self, numbers: dict[str, Any]) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        return (
            f"{numbers['documents']:,} documents · {numbers['text_bytes'] / seconds / 1e6:.1f} MB/s · "
            f"{numbers['tokens'] / seconds / 1e6:.2f} Mtok/s · {numbers['quarantined']:,} quarantined"
        )


def log_event(data_dir: Path, event: str, **values: Any) -> None:
    """Append one line to ``data/prep.log.jsonl``; a full disk does not stop the run here."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    try:
        with (data_dir / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return
