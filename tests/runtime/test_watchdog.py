"""A stall is named before it ends the process; progress keeps it quiet."""

from __future__ import annotations

import time

import pytest

from calm_scale.config.errors import EXIT_STALLED
from calm_scale.runtime.watchdog import Watchdog


def test_names_place_and_operation(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    stalled: list[str] = []
    watchdog = Watchdog(0.4, "lm rank 3 (pipeline 1)", on_stall=stalled.append, end=ended.append)
    with watchdog.doing("evaluation at step 20"):
        time.sleep(1.0)
    watchdog.close()
    said = capsys.readouterr().err
    assert "lm rank 3 (pipeline 1): in `evaluation at step 20` for" in said
    assert "lm rank 3 (pipeline 1): stalled: in `evaluation at step 20`" in said
    assert ended == [EXIT_STALLED] and stalled == ["evaluation at step 20"]


def test_an_operation_may_have_a_shorter_limit() -> None:
    stalled: list[str] = []
    watchdog = Watchdog(600.0, "rank 0", on_stall=stalled.append, end=lambda code: None)
    with watchdog.doing("outer"), watchdog.doing("training step 30", limit_seconds=0.2):
        for _ in range(600):
            if stalled:
                break
            time.sleep(0.1)
    watchdog.close()
    assert stalled == ["training step 30"]


def test_progress_keeps_it_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    watchdog = Watchdog(1.0, "rank 0", end=ended.append)
    for step in range(15):
        with watchdog.doing(f"training step {step}"):
            time.sleep(0.1)
    watchdog.close()
    assert ended == [] and capsys.readouterr().err == ""
