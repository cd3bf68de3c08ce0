"""The record: later attempts win, rolled-back rows go, torn lines spoil nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calm_scale.config.training import LoggingConfig
from calm_scale.record.metrics import MetricsRecord, highest_step, read_metrics
from calm_scale.runtime.curves import draw_curves
from calm_scale.runtime.telemetry import Telemetry


def life(path: Path, attempt: int, first: int, last: int) -> None:
    record = MetricsRecord(path, attempt, print)
    if attempt:
        record.resume(first - 1)
    for step in range(first, last + 1):
        record.row({"step": step, "loss": float(step)})
    record.sync()
    record.close()


def test_one_row_per_step_and_the_later_attempt_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    life(path, 0, 1, 17)
    life(path, 1, 11, 14)
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)][-5:] == [
        (10, 0),
        (11, 1),
        (12, 1),
        (13, 1),
        (14, 1),
    ]
    life(path, 2, 13, 30)
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 31))
    assert len(path.read_text().splitlines()) == 17 + 1 + 4 + 1 + 18, "nothing that happened is lost"
    assert highest_step(path) == 30


def test_torn_and_foreign_lines_spoil_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    life(path, 0, 1, 3)
    with path.open("a") as file:
        file.write('{"resume": "x"}\n{"resume": null}\n{"step": 4, "lo')
    life(path, 1, 4, 5)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    record = MetricsRecord(tmp_path / "m.jsonl", 0, print)
    record.row({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    record.close()
    assert read_metrics(tmp_path / "m.jsonl") == [
        {
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "lr": 0.1,
            "nonfinite": ["loss", "grad_norm"],
            "attempt": 0,
        }
    ]


def test_no_record_no_pictures(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
    assert draw_curves(tmp_path / "none.jsonl", tmp_path) == []


class Someone:
    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first


def test_other_ranks_say_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(tmp_path, LoggingConfig(), Someone(False), "lm")
    telemetry.begin(0, 2)
    telemetry.row({"step": 1, "loss": 1.0}, 2)
    telemetry.say("hello")
    telemetry.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


def test_wandb_that_fails_never_fails_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def init(**settings: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(wandb, "init", init)
    telemetry = Telemetry(tmp_path, LoggingConfig(pictures=False), Someone(True), "lm")
    telemetry.row({"step": 1, "loss": 1.0}, 2)
    telemetry.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] == 3:
            raise RuntimeError("gone")
        self.rows.append(row)

    def finish(self) -> None:
        raise RuntimeError("gone")


def test_every_attempt_is_a_wandb_run_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    started: list[dict[str, Any]] = []
    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        started.append(settings)
        runs.append(FakeRun())
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    for attempt in (0, 1):
        telemetry = Telemetry(tmp_path, LoggingConfig(pictures=False), Someone(True), "lm", "run-x", attempt)
        for step in (1, 2, 3, 4):
            telemetry.row({"step": step, "loss": 1.0}, 4)
        telemetry.close()
    assert [(s["id"], s["group"], s["mode"]) for s in started] == [
        ("run-x-a0", "run-x", "offline"),
        ("run-x-a1", "run-x", "offline"),
    ]
    assert ("*", "step") in runs[0].axes
    assert [row["step"] for row in runs[0].rows] == [1, 2], "after the first trouble it is silent"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_real_wandb_offline_holds_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed steps are not dropped: each attempt has a folder of its own."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    telemetry = Telemetry(tmp_path, LoggingConfig(pictures=False), Someone(True), "lm", "run-y", 3)
    telemetry.row({"step": 7, "loss": 1.0}, 8)
    telemetry.close()
    files = list((tmp_path / "wandb").glob("offline-run-*-run-y-a3/*.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0


def test_rows_are_plain_json(tmp_path: Path) -> None:
    life(tmp_path / "m.jsonl", 0, 1, 1)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 1.0, "attempt": 0}
