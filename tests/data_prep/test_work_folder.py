"""The work folder at bad moments: what is half removed is believed by nobody, what is not ours is left alone."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calm_scale.config import RunConfig
from calm_scale.config.errors import CalmScaleError
from data_prep.errors import (
    EncoderMismatchError,
    PrepError,
    ShardError,
    StarvedSplitError,
)
from data_prep.prep import journal as journal_module
from data_prep.prep import prep_plan as plan_module
from data_prep.prep import prepare
from data_prep.prep.prep_plan import check_disk, make_plan
from data_prep.prep.prep_report import verify_tree
from data_prep.prep.segment import EncodeTask
from data_prep.shards.compressed import compress_split
from data_prep.tokenizer import load_tokenizer

MakeConfig = Callable[..., RunConfig]
Usage = namedtuple("Usage", "total used free")


class Killed(BaseException):
    """What ``kill -9`` is here: nothing after it runs, nobody catches it."""


@pytest.fixture
def settings(tmp_path: Path, kit: SimpleNamespace) -> dict[str, Any]:
    """Two files, a third of whose documents repeat, a bad line, two splits, many segments."""
    texts = kit.make_texts(120)
    kit.write_lines(tmp_path / "in/a.jsonl", texts + texts[:40])
    file = kit.write_lines(tmp_path / "in/b.jsonl", texts[:30] + kit.make_texts(60, seed=1))
    file.write_bytes(file.read_bytes() + b"no json\n")
    return {
        "paths": tmp_path / "in",
        "segment_megabytes": 0.01,
        "deduplicate": True,
        "sequence_length": 32,
        "max_bad_fraction": 0.5,
        "splits": {"heldout": 0.2},
    }


@pytest.mark.parametrize("removed", [0, 1, 7, 30])
def test_killed_while_the_work_folder_is_removed(
    make_config: MakeConfig,
    kit: SimpleNamespace,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    removed: int,
) -> None:
    whole = make_config(workdir="whole", **settings)
    prepare(whole)
    config = make_config(workdir="run", **settings)

    def killed_after(folder: Path, ignore_errors: bool = False) -> None:
        files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.suffix == ".json")
        assert len(files) > 30
        for path in files[:removed]:
            path.unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(journal_module.shutil, "rmtree", killed_after)
        with pytest.raises(Killed):
            prepare(config)
    assert prepare(config).already_done
    assert kit.data_bytes(config.data_dir).keys() >= kit.data_bytes(whole.data_dir).keys()
    with monkeypatch.context() as patched:
        patched.setattr(journal_module.shutil, "rmtree", killed_after)
        with pytest.raises(Killed):
            prepare(make_config(workdir="run", **settings), restart=True)
    prepare(config, restart=True)
    assert kit.data_bytes(config.data_dir) == kit.data_bytes(whole.data_dir)


def test_what_is_written_already_needs_no_more_space(
    make_config: MakeConfig, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(**settings)
    plan = make_plan(config, load_tokenizer(config.tokenizer, config.tokenizer_path))
    monkeypatch.setattr(plan_module.shutil, "disk_usage", lambda _: Usage(0, 0, plan.disk_bytes // 2))
    with pytest.raises(PrepError, match="free some space"):
        check_disk(plan, config.data_dir)
    (config.data_dir / "train").mkdir(parents=True)
    (config.data_dir / "train/000000-000000.shard").write_bytes(bytes(plan.disk_bytes * 3 // 4))
    check_disk(plan, config.data_dir)
    (config.data_dir / "train/000000-000000.shard").write_bytes(bytes(plan.disk_bytes // 4))
    with pytest.raises(PrepError, match=r"beside the .* that are there"):
        check_disk(plan, config.data_dir)


def test_what_prep_has_not_written_stays(
    tmp_path: Path, make_config: MakeConfig, settings: dict[str, Any], tokenizer_path: Path
) -> None:
    config = make_config(**settings)
    prepare(config)
    mine = config.data_dir / "tokenizer.json"
    own = make_config(tokenizer={"path": str(mine)}, **settings)
    prepare(own, restart=True)
    assert mine.read_bytes() == tokenizer_path.read_bytes()
    foreign = [
        config.data_dir / name for name in ("tokenizer.model.keep", "other/manifest.json", "notes.part.txt")
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with pytest.raises(StarvedSplitError):
        prepare(make_config(**{**settings, "sequence_length": 1 << 20}), restart=True)
    assert all(path.read_text() == "mine" for path in foreign)
    assert mine.exists()
    assert not (config.data_dir / "train/manifest.json").exists()


def test_nothing_of_an_encoder_that_was_wrong_is_kept(
    make_config: MakeConfig, kit: SimpleNamespace, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(**settings)
    seen: list[int] = []

    def wrong_at_last(self: EncodeTask, texts: object) -> None:
        seen.append(1)
        if len(seen) == 10:
            raise EncoderMismatchError("'x' gives other ids. Set tokenizer.encoder: tokenizers", "tokenizers")

    with monkeypatch.context() as patched:
        patched.setattr(EncodeTask, "_check_sample", wrong_at_last)
        with pytest.raises(EncoderMismatchError):
            prepare(config)
    assert not list(config.data_dir.rglob("*.shard"))
    assert not (config.data_dir / ".prep").exists()
    follow = make_config(tokenizer={"encoder": "tokenizers"}, **settings)
    prepare(follow)
    clean = make_config(workdir="clean", tokenizer={"encoder": "tokenizers"}, **settings)
    prepare(clean)
    shards = {name: data for name, data in kit.data_bytes(clean.data_dir).items() if name.endswith(".shard")}
    assert shards
    assert shards == {n: d for n, d in kit.data_bytes(config.data_dir).items() if n.endswith(".shard")}


def test_a_finished_prep_without_its_plan(make_config: MakeConfig, settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    prepare(config)
    (config.data_dir / "plan.json").unlink()
    assert prepare(config).already_done
    before = (config.data_dir / "train/manifest.json").read_bytes()
    with pytest.raises(
        PrepError, match=r"not known to be of this prep.*--restart", check=lambda error: error.exit_code == 2
    ):
        prepare(make_config(**{**settings, "sequence_length": 16}))
    (config.data_dir / "manifest.json").unlink()  # as an imported split has none
    with pytest.raises(
        PrepError, match=r"train/manifest\.json is not known", check=lambda error: error.exit_code == 2
    ):
        prepare(config)
    assert (config.data_dir / "train/manifest.json").read_bytes() == before


def test_cold_shards_are_checked_and_discarded_too(make_config: MakeConfig, settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    prepare(config)
    compress_split(config.data_dir / "train")
    assert prepare(config).already_done
    cold = sorted((config.data_dir / "train").glob("*.shard.zst"))
    cold[0].write_bytes(cold[0].read_bytes()[:-40])
    with pytest.raises(ShardError, match=r"was finished and is damaged now"):
        prepare(config)
    prepare(config, restart=True)
    assert not list((config.data_dir / "train").glob("*.zst"))


def test_a_refused_prep_is_not_accepted(make_config: MakeConfig, settings: dict[str, Any]) -> None:
    accepted: list[str] = []
    config = make_config(**settings)
    prepare(config, on_accepted=lambda: accepted.append("first"))
    with pytest.raises(CalmScaleError):
        prepare(
            make_config(**{**settings, "sequence_length": 16}),
            on_accepted=lambda: accepted.append("refused"),
        )
    assert accepted == ["first"]
    assert not [split.problems for split in verify_tree(config.data_dir) if split.problems]
