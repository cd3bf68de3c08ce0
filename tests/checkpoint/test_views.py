"""Retention as a rule, status from disk, and where a checkpoint can resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import NoSuchCheckpointError
from calm_scale.checkpoint.judge import Entry, find, inventory, verify
from calm_scale.checkpoint.retention import superfluous
from calm_scale.checkpoint.status import stage_status
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.checkpoint.targets import resume_targets
from calm_scale.config import CalmScaleError, ConfigError, RunConfig
from calm_scale.config.training import CheckpointConfig, TrainingConfig
from calm_scale.record.json_lines import append_lines
from calm_scale.record.ledger import Event, line_of
from calm_scale.record.metrics import MetricsRecord
from calm_scale.runtime.world import World
from calm_scale.stages import checkpoints


def rule(**values: object) -> CheckpointConfig:
    return CheckpointConfig.model_validate(values)


def test_numbers_not_texts_are_sorted() -> None:
    assert superfluous({9000: None, 9999: None, 10000: None}, rule(keep_last=2)) == [9000]


def test_every_mth_and_the_best_stay() -> None:
    scores = {step: abs(step - 42) / 10 for step in range(10, 101, 10)}
    kept = set(scores) - set(
        superfluous(scores, rule(keep_last=2, keep_every=50, keep_best=2, best_metric="x"))
    )
    assert kept == {90, 100, 50, 40}


def test_a_metric_that_is_missing_or_nan_is_never_the_best() -> None:
    scores = {1: None, 2: float("nan"), 3: 5.0, 4: 1.0, 5: None}
    assert superfluous(scores, rule(keep_last=1, keep_best=1, best_mode="max")) == [1, 2, 4]


def test_one_always_stays() -> None:
    assert superfluous({7: None}, rule(keep_last=1)) == []
    assert superfluous({}, rule(keep_last=1)) == []


def test_find_and_verify_speak(store: CheckpointStore, save: Callable[..., Path], tmp_path: Path) -> None:
    path = save(100)
    assert find(store.root).step == 100 and find(store.root.parent).step == 100
    (store.root / "step_00000200.tmp").mkdir()
    assert [(e.step, e.state) for e in inventory(store.root)] == [(100, "complete"), (200, "unfinished")]
    assert verify(store.root / "step_00000200.tmp").state == "unfinished"
    with pytest.raises(NoSuchCheckpointError, match="Complete steps: 100"):
        find(store.root, step=300)
    with pytest.raises(NoSuchCheckpointError, match="is not a checkpoint"):
        verify(tmp_path)
    (path / "shards/rank_0.bin").write_bytes(b"")
    assert verify(path).reason == "shards/rank_0.bin: 0 bytes instead of 16384"


TRAINING = TrainingConfig(steps=100, global_batch=1, checkpoint=CheckpointConfig(interval=30))


def event(kind: str, step: int, time: float, **more: object) -> Event:
    return Event(kind=kind, attempt=0, stage="lm", step=step, time=time, **more)  # type: ignore[arg-type]


@pytest.fixture
def lm(tmp_path: Path, solo: World, card_of: Callable[..., Card], write: Callable[[Path], list[str]]) -> Path:
    """A run that saved step 30 and has done 50 steps, one every two seconds, until time 1100."""
    folder = tmp_path / "lm"
    CheckpointStore(folder / "checkpoints", solo, CheckpointConfig()).save(30, write, card_of(30))
    append_lines(folder / "ledger.jsonl", [line_of(event("start", 0, 1000.0))])
    record = MetricsRecord(folder / "metrics.jsonl", 0, print)
    for step in range(1, 51):
        record.row({"step": step, "loss": 1.0, "tokens_per_s": 500.0, "time": 1000.0 + 2 * step})
    record.close()
    return folder


def test_a_running_stage(lm: Path) -> None:
    status = stage_status(lm, TRAINING, now=1101.0)
    assert (status.state, status.attempts, status.step, status.checkpoint_step) == ("running", 1, 50, 30)
    assert status.seconds_per_step == pytest.approx(2.0)
    assert status.eta_seconds == pytest.approx(100.0)
    assert (status.next_save_step, status.next_save_seconds) == (60, pytest.approx(20.0))


def test_a_killed_stage_is_silent(lm: Path) -> None:
    status = stage_status(lm, TRAINING, now=9000.0)
    assert (status.state, status.eta_seconds) == ("silent", None)


@pytest.mark.parametrize(
    ("cause", "state"),
    [("signal", "stopped"), ("finished", "finished"), ("nonfinite", "failed"), ("stalled", "stopped")],
)
def test_an_ended_stage(cause: str, state: str, lm: Path) -> None:
    append_lines(lm / "ledger.jsonl", [line_of(event("stop", 50, 1101.0, cause=cause))])
    status = stage_status(lm, TRAINING, now=1102.0)
    assert (status.state, status.cause) == (state, cause)


def test_damaged_lines_are_passed_over_and_said(lm: Path) -> None:
    for name, line in (("ledger.jsonl", '{"time":0}\n'), ("metrics.jsonl", '{"resume":null}\n{"step":51}\n')):
        with (lm / name).open("a") as file:
            file.write(line)
    status = stage_status(lm, TRAINING, now=1101.0)
    assert (status.state, status.attempts, status.step) == ("running", 1, 51)
    assert status.damaged[0].startswith("ledger.jsonl: 1 unreadable line (2)")


def test_nothing_there(tmp_path: Path) -> None:
    assert stage_status(tmp_path / "lm").state == "not started"


def test_targets(card_of: Callable[..., Card]) -> None:
    lm = {
        "backbone": {
            "num_layers": 3,
            "hidden_size": 48,
            "ffn_size": 96,
            "num_heads": 6,
            "num_query_groups": 2,
        },
        "training": {"steps": 1, "global_batch": 12, "micro_batch": 2},
    }
    targets = resume_targets(card_of(1, config={"lm": lm}, topology={"tensor": 2}))
    assert (targets.tensor, targets.pipeline, targets.data) == ((1, 2), (1, 2, 3), (1, 2, 3, 6))
    autoencoder = {"training": {"steps": 1, "global_batch": 4}}
    targets = resume_targets(card_of(1, stage="autoencoder", config={"autoencoder": autoencoder}))
    assert (targets.zero_stages, targets.data) == ((0, 1, 2, 3), (1, 2, 4))


def test_a_card_of_another_version_s_run_is_refused_with_its_version(card_of: Callable[..., Card]) -> None:
    lm = {"backbone": {"num_layers": "three"}, "strange": 1}
    card = card_of(1, config={"lm": lm}, code_version="9.9")
    said = r"card.json: config.lm: does not fit: backbone.num_layers: .*; strange: unknown key; .*version 9.9"
    with pytest.raises(ConfigError, match=said):
        resume_targets(card)
    with pytest.raises(ConfigError, match=r"there/card.json: config: does not fit: "):
        card.described(RunConfig, folder=Path("there"))


def test_a_suspect_checkpoint_is_not_exported_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(Path("step_00000008"), 8, "suspect", "suspect: the last step was not finite")
    monkeypatch.setattr(checkpoints, "verify", lambda _: entry)
    with pytest.raises(
        CalmScaleError, match=r"^step_00000008: suspect: the last step was not finite; take another"
    ):
        checkpoints.shards_of(entry.path)
