"""A world of one and a card, enough to write real checkpoints without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calm_scale.checkpoint.card import Card, Counters
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config.training import CheckpointConfig
from calm_scale.runtime.world import World


@pytest.fixture
def solo() -> World:
    return World(0, 1, 0, 1, torch.device("cpu"), "gloo")


@pytest.fixture
def card_of() -> Callable[..., Card]:
    def make(step: int, run_id: str = "run-a", **more: Any) -> Card:
        values: dict[str, Any] = {
            "stage": "lm",
            "run_id": run_id,
            "config": {"patch_size": 4},
            "config_hash": "c0ffee",
            "patch_size": 4,
            "vocab_size": 1024,
            "tokenizer_fingerprint": "tok",
            "shards_fingerprint": "shards",
            "created": time.time(),
            "counters": Counters(steps=step, samples=step * 8, tokens=step * 64),
        }
        return Card(**(values | more))

    return make


@pytest.fixture
def write() -> Callable[[Path], list[str]]:
    def shards(folder: Path) -> list[str]:
        (folder / "rank_0.bin").write_bytes(bytes(range(256)) * 64)
        (folder / "inner").mkdir()
        (folder / "inner" / "rank_1.bin").write_bytes(b"\x01" * 5000)
        return ["inner/rank_1.bin", "rank_0.bin"]

    return shards


@pytest.fixture
def store(tmp_path: Path, solo: World) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", solo, CheckpointConfig(keep_last=3), run_id="run-a")


@pytest.fixture
def save(
    store: CheckpointStore, card_of: Callable[..., Card], write: Callable[[Path], list[str]]
) -> Callable[..., Path]:
    def one(step: int, **more: Any) -> Path:
        path = store.save(step, write, card_of(step, **more))
        store.rotate()
        return path

    return one
