"""Python's garbage collector during a training: off, and run at the same steps on every rank."""

from __future__ import annotations

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from calm_scale.runtime.world import World
from calm_scale.training.garbage import GarbageCollection


class Node:
    other: Any = None


def a_cycle() -> int:
    """Garbage that only a collection finds; returns its address."""
    first, second = Node(), Node()
    first.other, second.other = second, first
    return id(first)


def test_garbage_is_collected_at_the_interval_only(
    tiny: ModuleType, tmp_path: Path, solo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    steps: list[int] = []
    train_step = tiny.TinyEngine.train_step

    def with_garbage(engine: Any, batch: Any, lr: float) -> Any:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        steps.append(batch.step)
        a_cycle()
        return train_step(engine, batch, lr)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and steps:
            collected.append(steps[-1])
            assert info["collected"] > 0

    monkeypatch.setattr(tiny.TinyEngine, "train_step", with_garbage)
    gc.callbacks.append(note)
    try:
        tiny.run(tmp_path, {"training": {"gc_interval": 5, "steps": 12}}, solo)
        before_the_end = list(collected)
    finally:
        gc.callbacks.remove(note)
    assert before_the_end[:2] == [5, 10]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_interval_of_0_leaves_the_collector_alone() -> None:
    with GarbageCollection(0) as garbage:
        garbage.after(5)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0


def test_what_switched_the_collector_off_before_keeps_it_off() -> None:
    gc.disable()
    try:
        with GarbageCollection(1):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_gives_the_collector_back() -> None:
    with pytest.raises(ValueError, match="a step"), GarbageCollection(1):
        raise ValueError("a step")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
