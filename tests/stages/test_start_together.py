"""A job of several ranks starts on what its first rank found, and a mistake ends all of them with one message."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calm_scale.config import ConfigError, RunConfig, load
from calm_scale.config.files import FILE_WAIT_VARIABLE, LateFileError
from calm_scale.runtime.world import World
from calm_scale.stages.splits import make_ready, open_if_prepared, open_together, open_training_split
from data_prep.errors import ShardError
from data_prep.prep import prepare
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset

OnTwoRanks = Callable[[Callable[[World], object]], list[BaseException | None]]


@pytest.fixture(scope="module")
def prepared(write_document: Callable[..., Any]) -> RunConfig:
    """A run whose shards are there."""
    config = load(write_document("start").document)
    prepare(config)
    return config


def with_data(config: RunConfig, folder: Path, **changes: Any) -> RunConfig:
    return config.model_copy(update={"data": folder, **changes})


def many_shards(config: RunConfig, folder: Path, count: int) -> RunConfig:
    """The first shard of the training split, ``count`` times."""
    manifest = Manifest.read(config.data_dir / "train")
    entry = manifest.shards[0]
    names = [f"{number:06d}.shard" for number in range(count)]
    (folder / "train").mkdir(parents=True)
    for name in names:
        os.link(config.data_dir / "train" / entry.name, folder / "train" / name)
    shards = [entry.model_copy(update={"name": name}) for name in names]
    manifest.model_copy(update={"shards": shards}).write(folder / "train")
    headers = config.reading.model_copy(update={"check": "headers"})
    return with_data(config, folder, reading=headers)


def opened(config: RunConfig, world: World, split: str = "train") -> ShardDataset:
    dataset = open_together(world, config.data_dir / split, lambda: open_training_split(config, split, 64))
    return make_ready(config, dataset, world)


def looks_at_start(
    config: RunConfig, on_two_ranks: OnTwoRanks, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Opens and stats below the data folder, by rank."""
    threads: dict[int, int] = {}
    looks: Counter[int] = Counter()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, Path)) and str(path).startswith(str(config.data_dir)):
                looks[threads.get(threading.get_ident(), 0)] += (
                    1  # the first rank looks in a thread of its own
                )
            return real(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", counting(builtins.open))
        patch.setattr(io, "open", counting(io.open))
        patch.setattr(os, "stat", counting(os.stat))

        def rank(world: World) -> None:
            threads[threading.get_ident()] = world.rank
            opened(config, world)

        assert on_two_ranks(rank) == [None, None]
    return looks[0], looks[1]


def test_a_rank_that_reads_nothing_looks_equally_often_at_4_and_at_400_shards(
    prepared: RunConfig, tmp_path: Path, on_two_ranks: OnTwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = looks_at_start(many_shards(prepared, tmp_path / "few", 4), on_two_ranks, monkeypatch)
    many = looks_at_start(many_shards(prepared, tmp_path / "many", 400), on_two_ranks, monkeypatch)
    assert few[1] == many[1] <= 2
    assert many[0] - few[0] == 396, "the first rank opens every shard once"


def test_every_rank_reads_the_same_samples(
    prepared: RunConfig, tmp_path: Path, on_two_ranks: OnTwoRanks
) -> None:
    config = many_shards(prepared, tmp_path / "data", 3)
    rows: dict[int, Any] = {}

    def rank(world: World) -> None:
        dataset = opened(config, world)
        rows[world.rank] = (dataset.fingerprint, np.stack([dataset[i] for i in range(len(dataset))]))

    assert on_two_ranks(rank) == [None, None]
    assert rows[0][0] == rows[1][0]
    np.testing.assert_array_equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize("blind", [0, 1])
@pytest.mark.parametrize("comes", [True, False])
def test_a_data_folder_that_one_rank_sees_late_is_waited_for_and_then_an_error_of_both(
    prepared: RunConfig,
    tmp_path: Path,
    on_two_ranks: OnTwoRanks,
    monkeypatch: pytest.MonkeyPatch,
    blind: int,
    comes: bool,
) -> None:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "120" if comes else "0.5")
    late = tmp_path / "late"
    if comes:
        whole = shutil.copytree(prepared.data_dir, tmp_path / "whole")
        threading.Timer(0.5, lambda: whole.rename(late)).start()

    def rank(world: World) -> None:
        opened(with_data(prepared, late if world.rank == blind else prepared.data_dir), world)

    started = time.monotonic()
    errors = on_two_ranks(rank)
    assert time.monotonic() - started < 60
    if comes:
        assert errors == [None, None]
    else:
        assert [type(error) for error in errors] == [LateFileError] * 2
        first, second = (
            str(error).rpartition("/manifest.json")[2] for error in errors
        )  # a view is a folder here
        assert first == second
        assert "manifest.json" in str(errors[0]) and f"rank {blind} on " in str(errors[0])


def test_a_mistake_that_the_first_rank_finds_is_the_mistake_of_both(
    prepared: RunConfig, tmp_path: Path, on_two_ranks: OnTwoRanks
) -> None:
    small = prepared.model_copy(update={"vocab_size": 8})
    errors = on_two_ranks(lambda world: opened(small, world))
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "set vocab_size to at least" in str(errors[0])
    nowhere = on_two_ranks(lambda world: opened(with_data(prepared, tmp_path), world))
    assert all(
        isinstance(error, ConfigError) and "no prepared `train` split" in str(error) for error in nowhere
    )


def test_a_split_that_the_run_does_not_have_is_none_on_every_rank(
    prepared: RunConfig, tmp_path: Path, on_two_ranks: OnTwoRanks
) -> None:
    found: list[object] = []

    def rank(world: World) -> None:
        found.append(
            open_together(world, tmp_path / "heldout", lambda: open_if_prepared(bare, "heldout", 64))
        )

    bare = with_data(prepared, tmp_path)
    assert on_two_ranks(rank) == [None, None]
    assert found == [None, None]


def test_a_shard_that_changed_since_the_first_rank_looked_is_refused_when_it_is_read(
    prepared: RunConfig, tmp_path: Path, on_two_ranks: OnTwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "0")
    config = many_shards(prepared, tmp_path / "data", 2)

    def rank(world: World) -> None:
        dataset = opened(config, world)
        world.barrier()
        if world.is_first:
            (config.data_dir / "train" / "000000.shard").unlink()
        world.barrier()
        if not world.is_first:
            assert len(dataset[len(dataset) - 1]) == 64
            with pytest.raises(ShardError, match=r"000000.shard is missing"):
                dataset[0]

    assert on_two_ranks(rank) == [None, None]


@pytest.mark.ranks
def test_a_users_mistake_ends_a_job_of_two_ranks_with_code_2_and_one_message(
    prepared: RunConfig, write_document: Callable[..., Any], tmp_path: Path
) -> None:
    run = write_document("mistaken")
    (tmp_path / "train").mkdir()
    started = time.monotonic()
    ended = run.attempt(
        "train-lm", str(run.document), "--nproc", "2", "--set", f"data={tmp_path}", "--set", "device=cpu"
    )
    assert ended.code == 2
    assert ended.err.count("no prepared `train` split") == 1
    assert "Traceback" not in ended.err
    assert time.monotonic() - started < 90, "start-up of torch included; joining alone waits ten minutes"
