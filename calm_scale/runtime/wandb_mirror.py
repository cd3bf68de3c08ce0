"""wandb as a mirror of the record: offline by default, its own step key, and never a reason to fail.

wandb drops rows whose internal step goes backwards, and several offline folders with one run id do not join. So
every attempt is a wandb run of its own (``<run id>-a<attempt>``) in the group ``<run id>``, ``step`` is an ordinary
value that every chart uses as its axis, and the group reads in order.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calm_scale.config.training import LoggingConfig

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
