"""The loop on one rank: resume, guards, retention by metric, ends of data, refused resumes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import (
    CheckpointError,
    DiskFullError,
    NothingToResumeError,
    ResumeRefusedError,
)
from calm_scale.checkpoint.judge import inventory
from calm_scale.record import json_lines, ledger
from calm_scale.record.metrics import highest_step, next_attempt, read_metrics
from calm_scale.runtime.world import World
from calm_scale.training.nonfinite import NonFiniteError

TIMES = {"seconds", "cpu_seconds", "tokens_per_s", "time", "attempt"}


def record(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(folder / "metrics.jsonl")
    ]


def shards(folder: Path, step: int) -> dict[str, bytes]:
    inside = folder / "checkpoints" / f"step_{step:08d}" / "shards"
    return {path.name: path.read_bytes() for path in inside.iterdir()}


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in inventory(folder) if entry.state == "complete"]


@pytest.fixture(scope="module")
def unbroken(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("unbroken")
    outcome = tiny.run(folder, {"pictures": True}, World(0, 1, 0, 1, torch.device("cpu"), "gloo"))
    assert (outcome.step, outcome.cause, outcome.exit_code) == (12, "finished", 0)
    return folder


@pytest.mark.parametrize("stops", [[5], [4], [1, 2, 3, 11], [6], [0]])
@pytest.mark.parametrize("background", [False, True])
def test_resume_is_bitwise(
    stops: list[int],
    background: bool,
    unbroken: Path,
    tiny: ModuleType,
    tmp_path: Path,
    solo: World,
) -> None:
    options = {"training": {"checkpoint": {"interval": 4, "async_save": background}}}
    for stop in stops:
        outcome = tiny.run(tmp_path, options | {"stop_after": stop}, solo)
        assert (outcome.step, outcome.exit_code) == (stop, 75)
        assert max(steps(tmp_path)) == stop
    outcome = tiny.run(tmp_path, options, solo)
    assert outcome.resumed_at == stops[-1]
    assert record(tmp_path) == record(unbroken)
    assert shards(tmp_path, 12) == shards(unbroken, 12)


def test_sample_ids_after_resumes_inside_and_at_the_end_of_an_epoch(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    seen: list[list[int]] = []
    options = {"sequences": 48, "training": {"steps": 10}}
    for stop in (1, 2, 3, 4, None):  # 4 steps of 12 are the whole epoch
        tiny.run(tmp_path, options | {"stop_after": stop}, solo, seen=seen)
    assert list(chain.from_iterable(seen)) == list(range(120))


def test_a_second_start_after_the_end_does_nothing(unbroken: Path, tiny: ModuleType, solo: World) -> None:
    before = shards(unbroken, 12)
    outcome = tiny.run(unbroken, {}, solo)
    assert (outcome.step, outcome.exit_code, outcome.resumed_at) == (12, 0, 12)
    assert shards(unbroken, 12) == before and len(record(unbroken)) == 12


def test_the_ledger_tells_the_story(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    tiny.run(
        tmp_path, {"training": {"steps": 6, "optimizer": {"lr": 0.01}, "checkpoint": {"interval": 4}}}, solo
    )
    (tmp_path / "checkpoints/step_00000006/card.json").unlink()
    tiny.run(
        tmp_path, {"training": {"steps": 8, "optimizer": {"lr": 0.01}, "checkpoint": {"interval": 4}}}, solo
    )
    stops = [event for event in ledger.history(tmp_path / "ledger.jsonl").events if event.kind == "stop"]
    assert [(e.attempt, e.first_step, e.step, e.steps_done, e.steps_replayed, e.cause) for e in stops] == [
        (0, 0, 6, 6, 0, "finished"),
        (1, 4, 8, 4, 2, "finished"),
    ]
    assert stops[1].samples == 48 and stops[1].tokens == 48 * 16
    assert set(stops[0].seconds) >= {"load", "train", "save", "eval"}
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["attempt"]) for row in rows] == [(s, 0 if s <= 4 else 1) for s in range(1, 9)]


def test_a_skipped_step_advances_data_and_rate_but_not_the_parameters(
    tiny: ModuleType, tmp_path: Path, solo: World
) -> None:
    seen: list[list[int]] = []
    options = {"engine": {"bad_steps": [5]}, "training": {"checkpoint": {"interval": 1, "keep_last": 99}}}
    tiny.run(tmp_path, options, solo, seen=seen)
    assert list(chain.from_iterable(seen)) == list(range(144))
    rows = record(tmp_path)
    assert [row["step"] for row in rows if row["skipped"]] == [5]
    assert rows[4]["grad_norm"] is None and rows[4]["nonfinite"] == ["grad_norm"]
    assert rows[4]["lr"] not in (rows[3]["lr"], rows[5]["lr"])
    assert shards(tmp_path, 4) == shards(tmp_path, 5) != shards(tmp_path, 6)
    card = Card.read(tmp_path / "checkpoints/step_00000012")
    assert (card.counters.steps, card.counters.skipped_steps, card.counters.consecutive_skips) == (12, 1, 0)


def test_too_many_in_a_row_stop_and_are_not_saved(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    options = {"engine": {"bad_steps": [5, 6, 7]}, "training": {"max_nonfinite_steps": 3}}
    with pytest.raises(NonFiniteError, match=r"step 7: .* 3 steps in a row"):
        tiny.run(tmp_path, options, solo)
    assert steps(tmp_path) == [4]
    assert [row["step"] for row in record(tmp_path)] == list(range(1, 8))
    assert ledger.history(tmp_path / "ledger.jsonl").events[-1].cause == "nonfinite"


def test_on_nonfinite_stop_keeps_a_background_save(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    options = {
        "engine": {"bad_steps": [5], "slow_save": 0.3},
        "training": {"on_nonfinite": "stop", "checkpoint": {"interval": 4, "async_save": True}},
    }
    with pytest.raises(NonFiniteError, match="on_nonfinite"):
        tiny.run(tmp_path, options, solo)
    assert steps(tmp_path) == [4]


def test_bad_parameters_never_become_the_newest(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.TinyEngine, "is_finite", lambda engine: len(engine.seen) < 8)
    with pytest.raises(NonFiniteError, match="step 8: a parameter is not finite; not saved"):
        tiny.run(tmp_path, {}, solo)
    assert steps(tmp_path) == [4]


def test_end_of_data(
    tiny: ModuleType, tmp_path: Path, solo: World, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = tiny.run(tmp_path, {"training": {"end_of_data": "stop"}}, solo)
    assert (outcome.step, outcome.cause) == (4, "finished")
    assert "2 of 50 sequences are left" in capsys.readouterr().err


def test_repeating_data_says_so(
    tiny: ModuleType, tmp_path: Path, solo: World, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.run(tmp_path, {}, solo)
    said = capsys.readouterr().err
    assert said.count("end of epoch") == 2
    assert (
        "end of epoch 1 (50 sequences) in step 5" in said
        and "end of epoch 2 (50 sequences) in step 9" in said
    )


def test_best_checkpoints_stay(tiny: ModuleType, tmp_path: Path, solo: World) -> None:
    keep = {"interval": 1, "keep_last": 1, "keep_best": 1, "best_metric": "grad_norm", "keep_every": 6}
    tiny.run(tmp_path, {"training": {"checkpoint": keep}}, solo)
    norms = {row["step"]: row["grad_norm"] for row in record(tmp_path)}
    assert steps(tmp_path) == sorted({min(norms, key=norms.__getitem__), 6, 12})


def test_changed_shards_are_refused(unbroken: Path, tiny: ModuleType, solo: World) -> None:
    before = (unbroken / "ledger.jsonl").read_bytes()
    with pytest.raises(ResumeRefusedError, match="shards_fingerprint: 'tiny' → 'other'"):
        tiny.run(unbroken, {"shards": "other"}, solo)
    assert (unbroken / "ledger.jsonl").read_bytes() == before  # a refusal is no attempt


def test_a_changed_batch_needs_a_word(unbroken: Path, tiny: ModuleType, solo: World) -> None:
    with pytest.raises(ResumeRefusedError, match=r"--accept lm.training.global_batch"):
        tiny.run(unbroken, {"training": {"global_batch": 24}}, solo)
    outcome = tiny.run(
        unbroken, {"training": {"global_batch": 24}, "accept": ["lm.training.global_batch"]}, solo
    )
    assert outcome.resumed_at == 12


def test_a_step_that_is_not_there_is_not_resumed(unbroken: Path, tiny: ModuleType, solo: World) -> None:
    with pytest.raises(NothingToResumeError, match="no usable step 5"):
        tiny.run(unbroken, {"resume_step": 5}, solo)


def test_an_engine_that_cannot_load_stops(
    unbroken: Path, tiny: ModuleType, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(engine: object, directory: Path) -> None:
        raise KeyError("embed")

    monkeypatch.setattr(tiny.TinyEngine, "load", load)
    with pytest.raises(CheckpointError, match="cannot load it: KeyError: 'embed'"):
        tiny.run(unbroken, {}, solo)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk(
    policy: str, tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny.TinyEngine._write

    def write(engine: Any, directory: Path, state: Any) -> list[str]:
        names = original(engine, directory, state)
        if "step_00000008" in str(directory):
            raise OSError(28, "No space left on device")
        return names

    monkeypatch.setattr(tiny.TinyEngine, "_write", write)
    options = {"training": {"checkpoint": {"interval": 4, "on_disk_full": policy}}}
    if policy == "continue":
        assert tiny.run(tmp_path, options, solo).step == 12
        assert steps(tmp_path) == [4, 12]
    else:
        with pytest.raises(DiskFullError):
            tiny.run(tmp_path, options, solo)
        assert steps(tmp_path) == [4]
        assert ledger.history(tmp_path / "ledger.jsonl").events[-1].cause == "disk_full"
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_a_record_that_cannot_be_written_ends_no_training(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original = json_lines.append_lines

    def full(path: Path, *rest: Any) -> None:
        if highest_step(tmp_path / "metrics.jsonl") >= 3 and not steps(tmp_path):
            raise OSError(28, "No space left on device")
        original(path, *rest)

    monkeypatch.setattr(json_lines, "append_lines", full)
    assert tiny.run(tmp_path, {"training": {"checkpoint": {"interval": 8}}}, solo).step == 12
    assert [row["step"] for row in record(tmp_path)] == list(range(1, 13))
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl: No space left on device") == 1
    assert "metrics.jsonl can be written again: 6 lines" in said


def test_a_damaged_ledger_blocks_no_training(
    tiny: ModuleType, tmp_path: Path, solo: World, capsys: Any
) -> None:
    tiny.run(tmp_path, {"stop_after": 2}, solo)
    book = tmp_path / "ledger.jsonl"
    number = next_attempt(tmp_path / "metrics.jsonl")
    book.write_text('{"time":0}\n{"half\n[]\n')
    tiny.run(tmp_path, {"stop_after": 3}, solo)
    assert f"{book}: 3 unreadable lines (1, 2, 3)" in capsys.readouterr().err
    assert {event.attempt for event in ledger.history(book).events} == {number} != {0}


def test_the_run_id_survives_everything(unbroken: Path, tiny: ModuleType, solo: World) -> None:
    before = json.loads((unbroken / "run.json").read_text())["run_id"]
    (unbroken / "run.json").unlink()
    tiny.run(unbroken, {}, solo)
    assert json.loads((unbroken / "run.json").read_text())["run_id"] == before


def test_pictures_are_drawn(unbroken: Path) -> None:
    for name in ("loss.png", "curves.png"):
        assert (unbroken / name).read_bytes().startswith(b"\x89PNG")
