"""Stop signals: exactly one complete checkpoint of one agreed step, and the exit code that means "requeue"."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from calm_scale.checkpoint.judge import inventory
from calm_scale.config.errors import EXIT_REQUEUE
from calm_scale.record.metrics import read_metrics
from calm_scale.runtime.departure import StopSignals
from calm_scale.runtime.world import World

ALL = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
SPARSE = {"training": {"steps": 40, "checkpoint": {"interval": 30}, "eval_interval": 10}}


def complete(folder: Path) -> list[int]:
    return [entry.step for entry in inventory(folder) if entry.state == "complete"]


def kick(monkeypatch: pytest.MonkeyPatch, engine: type, method: str, at: int, *signals: int) -> None:
    """Signals this process inside the ``at``-th call of an engine's method."""
    original, calls = getattr(engine, method), []

    def kicked(self: Any, *args: Any) -> Any:
        calls.append(method)
        if len(calls) == at:
            for number in signals:
                os.kill(os.getpid(), number)
        return original(self, *args)

    monkeypatch.setattr(engine, method, kicked)


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize("times", [1, 2])
def test_during_a_step(
    number: int, times: int, tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kick(monkeypatch, tiny.TinyEngine, "train_step", 7, *[number] * times)
    with StopSignals() as stop:
        outcome = tiny.run(tmp_path, SPARSE, solo, stop)
    assert (outcome.step, outcome.cause, outcome.exit_code) == (7, "signal", EXIT_REQUEUE)
    assert complete(tmp_path) == [7]


@pytest.mark.parametrize("background", [False, True])
def test_during_a_save(
    background: bool, tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"training": {"steps": 40, "checkpoint": {"interval": 30, "async_save": background}}}
    kick(monkeypatch, tiny.TinyEngine, "save_async" if background else "save", 1, signal.SIGTERM)
    with StopSignals() as stop:
        outcome = tiny.run(tmp_path, options, solo, stop)
    assert (outcome.step, outcome.exit_code) == (30, EXIT_REQUEUE)
    assert complete(tmp_path) == [30]


def test_while_a_background_save_of_an_older_step_is_written(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "training": {"steps": 40, "checkpoint": {"interval": 30, "async_save": True}},
        "engine": {"slow_save": 0.5},
    }
    kick(monkeypatch, tiny.TinyEngine, "train_step", 32, signal.SIGTERM)
    with StopSignals() as stop:
        outcome = tiny.run(tmp_path, options, solo, stop)
    assert (outcome.step, outcome.exit_code) == (32, EXIT_REQUEUE)
    assert complete(tmp_path) == [30, 32]


def test_during_evaluation_and_the_resumed_run_evaluates(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kick(patch, tiny.TinyEngine, "evaluate", 1, signal.SIGUSR1)
        with StopSignals() as stop:
            outcome = tiny.run(tmp_path, SPARSE, solo, stop)
    assert (outcome.step, outcome.exit_code) == (10, EXIT_REQUEUE)
    assert complete(tmp_path) == [10]
    assert "eval/loss" not in read_metrics(tmp_path / "metrics.jsonl")[-1]
    tiny.run(tmp_path, SPARSE | {"stop_after": 11}, solo)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    whole = tmp_path / "unbroken"
    tiny.run(whole, SPARSE | {"stop_after": 11}, solo)
    assert [row.get("eval/loss") for row in rows] == [
        row.get("eval/loss") for row in read_metrics(whole / "metrics.jsonl")
    ]
    assert rows[9]["loss"] is not None and "eval/loss" in rows[9]


def test_before_the_first_step(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        outcome = tiny.run(tmp_path, SPARSE, solo, stop)
    assert (outcome.step, outcome.exit_code) == (0, EXIT_REQUEUE)
    assert complete(tmp_path) == [0]


def test_before_the_first_step_of_a_resumed_run(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    tiny.run(tmp_path, SPARSE | {"stop_after": 5}, solo)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        outcome = tiny.run(tmp_path, SPARSE, solo, stop)
    assert (outcome.step, outcome.exit_code) == (5, EXIT_REQUEUE)
    assert complete(tmp_path) == [5]


def test_during_the_last_evaluation_the_run_is_not_finished_yet(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kick(patch, tiny.TinyEngine, "train_step", 12, signal.SIGTERM)
        with StopSignals() as stop:
            outcome = tiny.run(tmp_path, {}, solo, stop)
    assert (outcome.step, outcome.exit_code) == (12, EXIT_REQUEUE)
    again = tiny.run(tmp_path, {}, solo)
    assert (again.step, again.exit_code) == (12, 0)
    assert "eval/loss" in read_metrics(tmp_path / "metrics.jsonl")[-1]


def test_after_the_last_step_the_run_is_finished(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kick(monkeypatch, tiny.TinyEngine, "save", 3, signal.SIGTERM)
    with StopSignals() as stop:
        outcome = tiny.run(tmp_path, {}, solo, stop)
    assert (outcome.step, outcome.cause, outcome.exit_code) == (12, "finished", 0)


def test_the_third_interrupt_is_obeyed_at_once() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.2)


@pytest.mark.ranks
def test_one_rank_is_told_during_evaluation(launch: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = launch(run, engine={"slow_eval": 0.2}, **SPARSE)
    ranks.until(lambda: "step 9/40" in ranks.text())
    ranks.send(signal.SIGUSR1, ranks=[1])
    assert ranks.wait() == [EXIT_REQUEUE] * 2
    assert len(complete(run)) == 1 and complete(run)[0] in (9, 10, 11)


@pytest.mark.ranks
def test_all_are_told_during_a_save(launch: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = launch(run, engine={"slow_save": 0.7}, training={"steps": 400, "checkpoint": {"interval": 30}})
    ranks.until((run / "checkpoints/step_00000030.tmp/shards").exists)
    ranks.send(signal.SIGTERM)
    ranks.send(signal.SIGINT)
    assert ranks.wait() == [EXIT_REQUEUE] * 2
    assert complete(run) == [30]


@pytest.mark.ranks
def test_told_while_starting(launch: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = launch(run, **SPARSE)
    ranks.until(lambda: all("ready" in log.read_text() for log in ranks.logs))
    ranks.send(signal.SIGTERM, ranks=[0])
    assert ranks.wait() == [EXIT_REQUEUE] * 2
    assert complete(run) == [0]
