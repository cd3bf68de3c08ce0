"""What a training says of its steps' time: traces of torch's profiler, the ranks' waits, stragglers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from calm_scale.checkpoint.status import stage_status
from calm_scale.config.errors import ConfigError
from calm_scale.config.run_folder import StageFolder
from calm_scale.config.training import ProfileConfig
from calm_scale.record.json_lines import last_object
from calm_scale.record.metrics import read_metrics
from calm_scale.runtime.wait_clock import WaitClock
from calm_scale.runtime.world import World
from calm_scale.stages import status
from calm_scale.training.profiling import _chosen


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def steps_in(trace: Path) -> set[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("training step")}


@pytest.mark.ranks
def test_a_slow_rank_is_named_with_its_waits_and_both_ranks_are_profiled(
    launch: Any, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "lm"
    slow = {"slow_step": 0.2, "slow_rank": 1}
    training = {"steps": 5, "profile": {"first_step": 2, "steps": 2, "ranks": [0, 1]}}
    ranks = launch(run, training=training, engine=slow)
    assert ranks.wait() == [0, 0]
    log = ranks.logs[0].read_text()
    assert "profile: recording steps 2 to 3 on ranks 0, 1" in log
    traces = sorted(StageFolder(run).profile.iterdir())
    assert [trace.name for trace in traces] == [f"attempt0-steps2-3-rank{rank}.json" for rank in (0, 1)]
    assert all(steps_in(trace) == {"training step 2", "training step 3"} for trace in traces)

    latest = last_object(StageFolder(run).ranks)
    assert latest is not None
    fast, late = (spent - wait for spent, wait in zip(latest["seconds"], latest["waited"], strict=True))
    assert latest["step"] == 5
    assert latest["seconds"][0] >= 0.15, "the fast rank's step is as long as the slow one's …"
    assert latest["waited"][0] >= 0.1, "… because it waits"
    assert late >= 0.2 > fast
    (straggler,) = latest["slow"]
    assert (straggler["rank"], straggler["node"]) == (1, socket.gethostname())
    assert straggler["times"] > 1.2
    assert straggler["since_step"] <= 3
    assert f"warning: rank 1 on {socket.gethostname()} takes" in log

    monkeypatch.setattr("calm_scale.checkpoint.status._state", lambda *_: ("running", None))
    assert [found.rank for found in stage_status(run).stragglers] == [1]
    console = Console(record=True, width=200)
    console.print(status._view(tmp_path, status.queue.Queue({})))
    assert f"lm: rank 1 on {socket.gethostname()} takes" in console.export_text()

    alone = tmp_path / "alone"
    tiny.run(alone, {"training": {"steps": 5}}, World(0, 1, 0, 1, torch.device("cpu"), "gloo"))
    assert losses(alone) == pytest.approx(losses(run), rel=1e-6)
    assert not StageFolder(alone).ranks.exists()


def test_a_profile_changes_no_number_and_ends_with_a_run_that_is_stopped(
    tiny: ModuleType, tmp_path: Path, solo: World, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = {"first_step": 4, "steps": 3}
    tiny.run(tmp_path / "profiled", {"training": {"profile": profile, "steps": 12}, "stop_after": 5}, solo)
    tiny.run(tmp_path / "plain", {"training": {"steps": 12}, "stop_after": 5}, solo)
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    (trace,) = StageFolder(tmp_path / "profiled").profile.iterdir()
    assert trace.name == "attempt0-steps4-5-rank0.json"
    assert steps_in(trace) == {"training step 4", "training step 5"}
    assert "profile: recorded steps 4 to 5 on rank 0" in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("config", "done", "expected"),
    [
        (None, 0, []),
        ({}, 0, [4, 5, 6]),
        ({}, 20, [24, 25, 26]),
        ({}, 28, [29, 30]),
        ({"steps": 40}, 0, list(range(1, 31))),
        ({"first_step": 10, "steps": 2}, 0, [10, 11]),
        ({"first_step": 10, "steps": 2}, 10, [11]),
        ({"first_step": 10, "steps": 2}, 11, []),
        ({"first_step": 31}, 0, []),
    ],
)
def test_the_recorded_steps(config: dict[str, int] | None, done: int, expected: list[int]) -> None:
    chosen = _chosen(None if config is None else ProfileConfig.model_validate(config), done, total=30)
    assert list(chosen) == expected


def test_a_rank_that_there_is_not_is_refused(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    with pytest.raises(ConfigError, match=r"training\.profile\.ranks: there is no rank 3 among 1 ranks"):
        tiny.run(tmp_path, {"training": {"profile": {"ranks": [0, 3]}}}, solo)


def test_the_clock_leaves_torch_as_it_was() -> None:
    classes = (torch.distributed.ProcessGroup, torch.distributed.Work)
    before = [dict(vars(kind)) for kind in classes]
    with pytest.raises(ValueError, match="in a step"), WaitClock(torch.device("cpu")).running():
        assert [dict(vars(kind)) for kind in classes] != before
        raise ValueError("in a step")
    assert [dict(vars(kind)) for kind in classes] == before


class Event:
    """A GPU's event that is a second later than the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_on_a_gpu_the_waits_are_between_events_around_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))
    monkeypatch.setattr(torch.distributed.ProcessGroup, "barrier", lambda group: "done")
    monkeypatch.setattr(torch.distributed.Work, "wait", lambda work: None)
    clock = WaitClock(torch.device("cuda"))
    with clock.running():
        assert torch.distributed.ProcessGroup.barrier(None) == "done"
        torch.distributed.Work.wait(None)
        assert not synchronized
    assert clock.seconds() == 2.0
    assert synchronized
