"""The one object that decides who prints: every rank calls it, the first rank prints, records and mirrors to wandb."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from calm_scale.config.run_folder import StageFolder
from calm_scale.config.training import LoggingConfig
from calm_scale.record.metrics import MetricsRecord, Row
from calm_scale.runtime.curves import draw_curves
from launchers.ranks import Ranks

SHOWN = ("loss", "grad_norm", "lr", "tokens_per_s")


class Telemetry:
    """Record, progress and wandb of one stage of one run.

    Args:
        folder: the stage's folder; ``metrics.jsonl``, the pictures and wandb's files go there.
        logging: intervals and wandb mode.
        world: only its first rank speaks.
        title: what is running, for people: ``autoencoder``, ``lm``.
        run_id: the run that all attempts belong to.
        attempt: number of this attempt.
        config: shown in wandb; holds no secrets.
    """

    def __init__(
        self,
        folder: Path,
        logging: LoggingConfig,
        world: Ranks,
        title: str,
        run_id: str = "run",
        attempt: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.attempt = folder, attempt
        self.metrics_path = StageFolder(folder).metrics
        self._logging, self._title = logging, title
        self._console = Console(stderr=True, quiet=not world.is_first, highlight=False)
        self._record = MetricsRecord(self.metrics_path, attempt, self.warn) if world.is_first else None
        self._wandb: WandbMirror | None = None
        self._run_id, self._config = run_id, dict(config or {})
        self._progress: Progress | None = None
        self._task: Any = None
        self._started = time.monotonic()

    @property
    def interval(self) -> int:
        """Steps between the lines that are shown."""
        return self._logging.interval

    def say(self, text: str) -> None:
        """A line for people."""
        self._print(f"[{self._title}] {text}")

    def warn(self, text: str) -> None:
        """A line for people that matters more."""
        self._print(f"[{self._title}] warning: {text}", style="yellow")

    def begin(self, step: int, total_steps: int) -> None:
        """Training goes on after ``step``. Before this, or the first row, nothing is written."""
        self._open_wandb()
        if self._record is not None and step > 0:
            self._record.resume(step)
        elif self._record is not None and self.attempt > 0:
            self._record.resume(0)
        if self._logging.progress and self._console.is_terminal and not self._console.quiet:
            columns = (
                TextColumn(f"[bold]{self._title}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task(self._title, total=total_steps, completed=step, shown="")
            self._progress.start()

    def row(self, row: Row, total_steps: int) -> None:
        """One step's numbers: recorded always, shown every ``logging.interval`` steps."""
        if self._record is None:
            return
        self._record.row(row)
        self._open_wandb()
        step = int(row["step"])
        if self._wandb is not None:
            self._wandb.row(row)
        shown = "  ".join(
            f"{name} {row[name]:.4g}" for name in SHOWN if isinstance(row.get(name), int | float)
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
        elif step % self._logging.interval == 0 or step == total_steps:
            self.say(f"step {step}/{total_steps}  {shown}")

    def _open_wandb(self) -> None:
        if self._record is not None and self._wandb is None:
            self._wandb = WandbMirror(
                self.folder, self._logging, self._run_id, self.attempt, self._title, self._config, self.warn
            )

    def sync(self) -> None:
        """Makes the record durable before a checkpoint relies on it."""
        if self._record is not None:
            self._record.sync()

    def _print(self, text: str, style: str | None = None) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk, or a closed pipe
            self._console.print(text, markup=False, style=style, soft_wrap=True)

    def close(self) -> None:
        """Ends progress and wandb, draws the curves. A picture that fails is a warning."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._record is None:
            return
        self._record.close()
        self._record = None
        if self._wandb is None:  # nothing began
            return
        self._wandb.close()
        if not self._logging.pictures:
            return
        try:
            draw_curves(self.metrics_path, self.folder)
        except Exception as error:
            self.warn(f"no pictures: {type(error).__name__}: {error}")


PATIENCE_SECONDS = 30.0


class WandbMirror:
    """Forwards rows to wandb until the first trouble; then it says so once and is silent."""

    def __init__(
        self,
        folder: Path,
        logging: LoggingConfig,
        run_id: str,
        attempt: int,
        title: str,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._run: Any = None
        if logging.wandb != "disabled":
            self._try(lambda: self._start(folder, logging, run_id, attempt, title, config))

    def row(self, row: dict[str, Any]) -> None:
        """Forwards the numbers of one row that are finite; wandb's own files are JSON too."""
        if self._run is not None:
            finite = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
            self._try(lambda: self._run.log(finite))

    def close(self) -> None:
        """Finishes within ``PATIENCE_SECONDS`` or leaves it; the record is on disk anyway."""
        run, self._run = self._run, None
        if run is None:
            return
        finishing = threading.Thread(target=lambda: _quietly(run.finish), daemon=True)
        finishing.start()
        finishing.join(PATIENCE_SECONDS)
        if finishing.is_alive():
            self._warn("wandb does not finish; going on without it")

    def _start(
        self,
        folder: Path,
        logging: LoggingConfig,
        run_id: str,
        attempt: int,
        title: str,
        config: dict[str, Any],
    ) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        settings = wandb.Settings(
            init_timeout=PATIENCE_SECONDS, console="off", silent=True, x_disable_stats=True
        )
        run = wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            dir=str(folder),
            mode=logging.wandb,
            id=f"{run_id}-a{attempt}",
            group=run_id,
            name=f"{title} attempt {attempt}",
            config=config | {"run_id": run_id, "attempt": attempt},
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._run = None
            self._warn(
                f"wandb is off for this attempt ({type(error).__name__}: {error}); metrics.jsonl is the record"
            )


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        return
