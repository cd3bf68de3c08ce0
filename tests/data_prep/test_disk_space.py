"""The room that shards need is measured beforehand, and a full disk is told with path and bytes."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError, explain
from data_prep.prep import foresee, prepare
from data_prep.prep.prep_plan import estimate
from data_prep.tokenizer.definition import train_bpe

MakeConfig = Callable[..., RunConfig]


def write_bytes_of(config: RunConfig) -> int:
    return sum(path.stat().st_size for path in config.data_dir.rglob("*.shard"))


@pytest.mark.parametrize("packing", ["concat", "aligned"])
@pytest.mark.parametrize("vocabulary", [270, 1200])
def test_the_estimate_is_that_of_the_tokenizer(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, vocabulary: int, packing: str
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(1500))
    tokenizer = train_bpe([path], vocabulary, tmp_path / "t.json")
    config = make_config(
        path, tokenizer={"path": str(tokenizer)}, vocab_size=vocabulary, packing=packing, keep_tail=["train"]
    )
    plan = foresee(config).plan
    prepare(config)
    assert plan.disk_bytes == pytest.approx(write_bytes_of(config), rel=0.1)
    assert estimate(config).shard_bytes == pytest.approx(plan.disk_bytes, rel=0.01)


def test_each_source_is_measured(tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace) -> None:
    plain = kit.write_lines(tmp_path / "plain.jsonl", kit.make_texts(800))
    dense = kit.write_lines(tmp_path / "dense.jsonl", ["\x01字" * 300 + str(i) for i in range(200)])
    sources = [{"paths": [str(plain)]}, {"paths": [str(dense)]}]
    config = make_config([], sources=sources, keep_tail=["train"])
    plan = foresee(config).plan
    prepare(config)
    assert plan.disk_bytes == pytest.approx(write_bytes_of(config), rel=0.1)


def test_a_shard_that_finds_no_room_is_told_with_path_and_bytes(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    """A limit on the size of files ends a write as a full disk does."""
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(2000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(PrepError) as caught:
            prepare(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shard = config.data_dir / "train/000000-000000.shard"
    assert str(shard) in str(caught.value)
    assert "bytes were to be written, its file system has " in str(caught.value)
    assert not list(config.data_dir.rglob("*.part"))
    prepare(config)
    assert shard.exists()


def test_no_room_for_another_file_names_it_too(tmp_path: Path) -> None:
    text = explain(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "a.json")), "rank 0")
    assert f"the disk is full at {tmp_path / 'a.json'} (its file system has " in text
