"""The store on one rank: commits, damage, wrecks, other runs, full disks, retention."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import DiskFullError, NothingToResumeError, SaveError
from calm_scale.checkpoint.judge import inventory, verify
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config.training import CheckpointConfig
from calm_scale.runtime.world import World

Save = Callable[..., Path]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_commit_is_whole(store: CheckpointStore, save: Save) -> None:
    path = save(100)
    assert path.name == "step_00000100"
    assert names(store.root) == ["latest", "step_00000100"]
    assert (store.root / "latest").read_text() == "step_00000100\n"
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert {entry["path"] for entry in listed} == {
        "card.json",
        "shards/rank_0.bin",
        "shards/inner/rank_1.bin",
    }
    found = store.newest()
    assert found is not None and found.step == 100 and found.passed_over == ()
    assert verify(path).verified is True


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shard missing": lambda step: (step / "shards/rank_0.bin").unlink(),
    "shard cut": lambda step: os.truncate(step / "shards/rank_0.bin", 100),
    "shard empty": lambda step: os.truncate(step / "shards/rank_0.bin", 0),
    "shard zeroed": lambda step: (step / "shards/rank_0.bin").write_bytes(bytes(256 * 64)),
    "shard flipped": lambda step: flip(step / "shards/rank_0.bin"),
    "card missing": lambda step: (step / "card.json").unlink(),
    "card cut": lambda step: os.truncate(step / "card.json", 20),
    "manifest missing": lambda step: (step / "manifest.json").unlink(),
    "manifest edited": lambda step: (step / "manifest.json").write_text(
        (step / "manifest.json").read_text().replace("5000", "5001")
    ),
    "everything missing": lambda step: [
        shutil.rmtree(step / "shards"),
        (step / "card.json").unlink(),
        (step / "manifest.json").unlink(),
    ],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_passed_over(kind: str, store: CheckpointStore, save: Save, solo: World) -> None:
    save(100)
    newest = save(200)
    DAMAGE[kind](newest)
    fresh = CheckpointStore(store.root, solo, store.config, run_id="run-a")
    found = fresh.newest()
    assert found is not None and found.step == 100
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("step_00000200: ")
    assert newest.is_dir(), "a damaged one is never deleted"


def test_the_same_process_notices_damage_too(store: CheckpointStore, save: Save) -> None:
    save(100)
    flip(save(200) / "shards/rank_0.bin")
    found = store.newest()
    assert found is not None and found.step == 100


def test_a_wreck_does_not_block_its_step(
    store: CheckpointStore,
    save: Save,
    tmp_path: Path,
    solo: World,
    card_of: Callable[..., Card],
    write: Callable[[Path], list[str]],
) -> None:
    save(100)
    damaged = save(200)
    flip(damaged / "shards/rank_0.bin")
    (store.root / "step_00000200.tmp/shards").mkdir(parents=True)
    said: list[str] = []
    again = CheckpointStore(store.root, solo, store.config, run_id="run-a", say=said.append)
    again.save(200, write, card_of(200))
    found = again.newest()
    assert found is not None and found.step == 200
    aside = [name for name in names(store.root) if name.startswith("step_00000200.damaged-")]
    assert len(aside) == 1 and any("moved the damaged" in line for line in said)
    assert any("removing step_00000200.tmp" in line for line in said)


def test_nothing_at_all_is_a_fresh_start(store: CheckpointStore) -> None:
    assert store.newest() is None


def test_only_a_first_save_that_was_killed_is_a_fresh_start(store: CheckpointStore) -> None:
    (store.root / "step_00000100.tmp/shards").mkdir(parents=True)
    assert store.newest() is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_nothing_complete_stops(kind: str, store: CheckpointStore, save: Save, solo: World) -> None:
    DAMAGE[kind](save(100))
    with pytest.raises(NothingToResumeError, match="step_00000100: "):
        CheckpointStore(store.root, solo, store.config, run_id="run-a").newest()


def test_a_pointer_without_its_checkpoint_stops(store: CheckpointStore, save: Save) -> None:
    shutil.rmtree(save(100))
    with pytest.raises(NothingToResumeError, match="names a checkpoint that is gone"):
        store.newest()


@pytest.mark.parametrize("pointer", [None, "", "step_00009999\n"])
def test_the_pointer_proves_nothing(pointer: str | None, store: CheckpointStore, save: Save) -> None:
    save(100), save(200)
    latest = store.root / "latest"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    found = store.newest()
    assert found is not None and found.step == 200


def test_what_stands_in_the_pointers_way_fails_no_save(store: CheckpointStore, save: Save) -> None:
    save(100)
    (store.root / "latest").unlink()
    (store.root / "latest").mkdir()
    assert verify(save(200)).verified is True
    found = store.newest()
    assert found is not None and found.step == 200


def test_an_asked_for_step(store: CheckpointStore, save: Save) -> None:
    save(100), save(200)
    found = store.newest(step=100)
    assert found is not None and found.step == 100
    with pytest.raises(NothingToResumeError, match="Complete steps: 100, 200"):
        store.newest(step=150)


def test_another_runs_folder_is_neither_resumed_nor_counted(
    store: CheckpointStore,
    save: Save,
    solo: World,
    card_of: Callable[..., Card],
    write: Callable[[Path], list[str]],
) -> None:
    other = CheckpointStore(store.root, solo, store.config, run_id="run-b")
    other.save(99999, write, card_of(99999, run_id="run-b"))
    for step in (9998, 9999, 10000, 10001):
        save(step)
    store.close()
    assert [e.step for e in inventory(store.root)] == [9999, 10000, 10001, 99999]
    found = store.newest()
    assert found is not None and found.step == 10001
    assert "belongs to another run (run-b" in found.passed_over[0]


def test_keep_last_counts_verified_ones(store: CheckpointStore, save: Save, solo: World) -> None:
    for step in (1, 2, 3):
        save(step)
    flip(store.root / "step_00000003/shards/rank_0.bin")
    save(4)
    store.close()
    assert [e.step for e in inventory(store.root)] == [1, 2, 3, 4]
    save(5)
    store.close()
    assert [e.step for e in inventory(store.root)] == [2, 3, 4, 5]


def test_a_failed_write_leaves_nothing_and_rotates_nothing(
    store: CheckpointStore, save: Save, card_of: Callable[..., Card]
) -> None:
    for step in (1, 2, 3):
        save(step)

    def full(folder: Path) -> None:
        (folder / "whole.bin").write_bytes(b"x" * 100)
        (folder / "part.bin").symlink_to("/dev/full")  # the kernel's own ENOSPC
        (folder / "part.bin").write_bytes(b"x" * 100)

    with pytest.raises(DiskFullError, match="no space left on the disk"):
        store.save(4, full, card_of(4))
    with pytest.raises(SaveError, match="rank 0: ValueError: broken"):
        store.save(4, lambda folder: (_ for _ in ()).throw(ValueError("broken")), card_of(4))
    assert names(store.root) == ["latest", "step_00000001", "step_00000002", "step_00000003"]
    save(4)
    store.close()
    assert names(store.root) == ["latest", "step_00000002", "step_00000003", "step_00000004"]


def test_space_is_estimated_before_a_byte_is_written(
    store: CheckpointStore, save: Save, card_of: Callable[..., Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    usage = type("Usage", (), {"free": 20_000})()
    monkeypatch.setattr("calm_scale.checkpoint.retention.shutil.disk_usage", lambda path: usage)
    written: list[Path] = []
    with pytest.raises(DiskFullError, match=r"needs about .* KiB"):
        store.save(2, written.append, card_of(2))
    assert written == [] and names(store.root) == ["latest", "step_00000001"]


def test_a_background_save_commits_in_pieces(
    store: CheckpointStore, card_of: Callable[..., Card], write: Callable[[Path], list[str]]
) -> None:
    store.begin(7, write, card_of(7))
    assert not (store.root / "step_00000007").exists()
    while store.saving is not None:
        if not store.waiting:
            store.advance()
    assert verify(store.root / "step_00000007").verified is True


def test_zero_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointConfig(keep_last=0)
