"""`ckpt ls` on a terminal of 80 columns: one line a checkpoint, its layout in short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.stages.checkpoints import list_checkpoints


def test_layouts_are_written_in_short(card_of: Callable[..., Card]) -> None:
    lm = {"world_size": 4, "tensor": 1, "pipeline": 2, "virtual_pipeline": 2, "data": 2}
    assert card_of(1, topology={**lm, "virtual_pipeline": 1}).layout == "tp1 pp2 dp2"
    assert card_of(1, topology=lm).layout == "tp1 pp2 × 2 chunks dp2"
    assert card_of(1, topology={"world_size": 2, "zero_stage": 2}).layout == "zero2 ×2"
    assert card_of(1, topology={}).layout == ""


def test_a_checkpoint_takes_one_line_and_damage_stands_below(
    store: CheckpointStore,
    save: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(100)
    (save(200) / "card.json").unlink()
    monkeypatch.setenv("COLUMNS", "80")
    list_checkpoints(store.root)
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80
    assert any("verified" in line.split() and line.rstrip().endswith("written by") for line in lines)
    assert [line.split()[0] for line in lines if " complete " in line or " damaged " in line] == [
        "100",
        "200",
    ]
    assert any(line.startswith("step 200: ") for line in lines)
