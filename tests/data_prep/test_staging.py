"""Copies of a split on a node's disk: shared, and nothing left of a failure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import ShardError
from data_prep.prep import prepare
from data_prep.shards.staging import stage_split


def test_a_copy_is_for_all_users_and_a_failure_leaves_nothing(
    tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace
) -> None:
    config = make_config(kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(60)))
    prepare(config)
    split, local = config.data_dir / "train", tmp_path / "local"
    stage_split(split, local)
    assert (local / ".stage.lock").stat().st_mode & 0o777 == 0o666
    before = {path.name: path.stat().st_mtime_ns for path in local.iterdir()}
    stage_split(split, local)
    assert {path.name: path.stat().st_mtime_ns for path in local.iterdir()} == before

    def full(name: str, target: Path) -> None:
        if name.endswith(".shard"):
            raise OSError(28, "No space left on device")
        shutil.copyfile(name, target)

    with pytest.raises(ShardError, match="the disk is full"):
        stage_split(split, tmp_path / "full", full)
    assert [path.name for path in (tmp_path / "full").iterdir()] == [".stage.lock"]
    with pytest.raises(
        ShardError,
        match=r"cannot be written to .*reading\.stage_to",
        check=lambda error: error.exit_code == 2,
    ):
        stage_split(split, local / "manifest.json" / "x")
