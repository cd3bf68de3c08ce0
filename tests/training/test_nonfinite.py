"""A training whose numbers stop being finite: what is kept, what is marked suspect, how it ends and goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from calm_scale.checkpoint.errors import NothingToResumeError, ResumeRefusedError
from calm_scale.checkpoint.judge import inventory
from calm_scale.checkpoint.status import stage_status
from calm_scale.config.errors import EXIT_NONFINITE, EXIT_REQUEUE
from calm_scale.record import ledger
from calm_scale.runtime.departure import StopSignals
from calm_scale.runtime.world import World
from calm_scale.training.nonfinite import NonFiniteError

GOOD, LETHAL = 0.01, 1e30
"""The first update at the lethal rate leaves weights that are finite and give losses that are not."""


def options(steps: int, lr: float = GOOD, background: bool = False, **more: Any) -> dict[str, Any]:
    training = {
        "steps": steps,
        "optimizer": {"lr": lr, "schedule": {"kind": "constant", "warmup_steps": 0}},
        "checkpoint": {"interval": 2, "keep_last": 3, "async_save": background},
        "eval_interval": 100,
    }
    accept = ["lm.training.optimizer.lr"]
    return {"training": training | more.pop("training", {}), "accept": accept, **more}


def states(folder: Path) -> dict[int, str]:
    return {entry.step: entry.state for entry in inventory(folder)}


@pytest.mark.parametrize("background", [False, True])
def test_the_good_checkpoints_outlive_a_streak_and_the_run_goes_on_from_them(
    background: bool, tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    tiny.run(tmp_path, options(6, background=background), solo)
    with pytest.raises(NonFiniteError, match=r"step 17: .* 10 steps in a row.*then start it again") as caught:
        tiny.run(tmp_path, options(40, LETHAL, background), solo)
    assert caught.value.exit_code == EXIT_NONFINITE == 76
    assert states(tmp_path) == dict.fromkeys((2, 4, 6), "complete") | dict.fromkeys(
        range(8, 17, 2), "suspect"
    )
    outcome = tiny.run(tmp_path, options(12, background=background), solo)
    assert (outcome.resumed_at, outcome.step, outcome.exit_code) == (6, 12, 0)
    assert states(tmp_path) == dict.fromkeys((8, 10, 12), "complete") | dict.fromkeys((14, 16), "suspect")


def test_a_run_that_ends_in_a_streak_has_failed(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    tiny.run(tmp_path, options(6), solo)
    with pytest.raises(NonFiniteError, match="ended at step 9, but the last 2 steps were not finite"):
        tiny.run(tmp_path, options(9, LETHAL), solo)
    assert states(tmp_path) == dict.fromkeys((2, 4, 6), "complete") | dict.fromkeys((8, 9), "suspect")
    assert ledger.history(tmp_path / "ledger.jsonl").events[-1].cause == "nonfinite"
    status = stage_status(tmp_path)
    assert (status.state, status.checkpoint_step) == ("failed", 6)
    assert any(line.startswith("step_00000009: suspect: the last 2 steps") for line in status.damaged)


def test_a_run_that_was_never_finite_is_not_resumed_unasked(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    with pytest.raises(NonFiniteError, match="ended at step 4"):
        tiny.run(tmp_path, options(4, LETHAL), solo)
    assert states(tmp_path) == {2: "suspect", 4: "suspect"}
    with pytest.raises(NothingToResumeError, match="--resume-step 4 or 2"):
        tiny.run(tmp_path, options(4), solo)
    with pytest.raises(NonFiniteError):
        tiny.run(tmp_path, options(6, resume_step=2), solo)


def test_the_checkpoint_of_the_update_that_lost_the_model_is_suspect_too(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    """Its own step was finite: the loss was computed before the update. It proved step 7, so step 2 made room."""
    tiny.run(tmp_path, options(40, stop_after=7), solo)
    with pytest.raises(NonFiniteError):
        tiny.run(tmp_path, options(10, LETHAL), solo)
    assert states(tmp_path) == dict.fromkeys((4, 6, 7), "complete") | {8: "suspect", 10: "suspect"}
    assert tiny.run(tmp_path, options(10), solo).resumed_at == 7


def test_a_good_checkpoint_before_bad_data_stays_resumable(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    with pytest.raises(NonFiniteError):
        tiny.run(tmp_path, options(40, engine={"bad_steps": range(5, 40)}), solo)
    assert states(tmp_path)[4] == "complete" and states(tmp_path)[6] == "suspect"


@pytest.mark.parametrize("at", [7, 9])
def test_a_signal_during_a_streak_saves_a_suspect_and_the_next_start_goes_on_from_before(
    at: int, tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tiny.run(tmp_path, options(40, stop_after=6), solo)
    original = tiny.TinyEngine.train_step

    def kicked(engine: Any, batch: Any, lr: float) -> Any:
        if batch.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(engine, batch, lr)

    with monkeypatch.context() as patch, StopSignals() as stop:
        patch.setattr(tiny.TinyEngine, "train_step", kicked)
        outcome = tiny.run(tmp_path, options(40, engine={"bad_steps": [7, 8, 9]}), solo, stop)
    assert (outcome.step, outcome.exit_code) == (at, EXIT_REQUEUE)
    assert states(tmp_path)[at] == "suspect" and states(tmp_path)[6] == "complete"
    assert f"stopped at step {at}, saved as suspect" in capsys.readouterr().err
    assert tiny.run(tmp_path, options(40, stop_after=12), solo).resumed_at == 6


def test_a_held_out_loss_that_is_not_finite_at_the_end_is_a_failure(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    """The last update loses the model; only the evaluation after it shows that."""
    tiny.run(tmp_path, options(6), solo)
    with pytest.raises(NonFiniteError, match="the held-out loss at step 7 is not finite"):
        tiny.run(tmp_path, options(7, LETHAL), solo)
    assert states(tmp_path) == dict.fromkeys((2, 4, 6), "complete") | {7: "suspect"}


def test_a_held_out_loss_that_is_not_finite_on_the_way_is_a_warning(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original = tiny.TinyEngine.evaluate
    scores = iter([{"loss": float("nan")}])
    monkeypatch.setattr(
        tiny.TinyEngine, "evaluate", lambda self, batches: next(scores, None) or original(self, batches)
    )
    assert tiny.run(tmp_path, options(8, training={"eval_interval": 4, "steps": 8}), solo).exit_code == 0
    assert "warning: the held-out loss at step 4 is not finite" in capsys.readouterr().err
    assert set(states(tmp_path).values()) == {"complete"}


def test_the_older_checkpoint_goes_when_a_finite_step_has_followed_the_newer(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    one = {"checkpoint": {"interval": 2, "keep_last": 1}}
    tiny.run(tmp_path, options(40, training=one | {"steps": 40}, stop_after=4), solo)
    assert list(states(tmp_path)) == [2, 4]
    tiny.run(tmp_path, options(40, training=one | {"steps": 40}, stop_after=5), solo)
    assert list(states(tmp_path)) == [4, 5], "step 2 went before step 5 was saved"
    tiny.run(tmp_path, options(40, training=one | {"steps": 40}, stop_after=7), solo)
    assert list(states(tmp_path)) == [6, 7]


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_complete_run_started_again_changes_no_file(
    tiny: ModuleType, tmp_path: Path, solo: World, capsys: Any
) -> None:
    tiny.run(tmp_path, options(6, pictures=True), solo)
    before = everything(tmp_path)
    outcome = tiny.run(tmp_path, options(6, pictures=True), solo)
    assert (outcome.step, outcome.cause, outcome.exit_code) == (6, "finished", 0)
    assert everything(tmp_path) == before
    assert "already complete: step 6" in capsys.readouterr().err


@pytest.mark.parametrize("stop_after", [None, 7])
def test_fewer_steps_than_were_done_are_refused(
    stop_after: int | None, tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    tiny.run(tmp_path, options(8, stop_after=stop_after), solo)
    before = everything(tmp_path)
    fewer = options(5)
    fewer["accept"].append("lm.training.steps")
    with pytest.raises(
        ResumeRefusedError, match=r"steps: 8 → 5 .*: [78] steps are done already; give [78] or more"
    ):
        tiny.run(tmp_path, fewer, solo)
    assert everything(tmp_path) == before
