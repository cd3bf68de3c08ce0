"""An input is known by its content: one that was only touched goes on, one that was changed is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError
from data_prep.prep import foresee, prepare
from data_prep.prep.journal import SegmentRecord
from data_prep.prep.segment import SplitSink

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def large(tmp_path: Path, kit: SimpleNamespace) -> Path:
    """Larger than the ends that identify a file."""
    return kit.write_lines(tmp_path / "in/a.jsonl", kit.make_texts(900, words=60))


def change_in_the_middle(path: Path) -> None:
    """Another letter, the same size and ends."""
    data = bytearray(path.read_bytes())
    assert len(data) > 3 << 16
    at = data.index(b"energy", len(data) // 2)
    data[at : at + 6] = b"ENERGY"
    path.write_bytes(bytes(data))
    os.utime(path, ns=(1, 1))


def interrupt(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, done = SplitSink.commit, []

    def stop_at_third(sink: SplitSink) -> None:
        done.append(sink)
        if len(done) > 2:
            raise KeyboardInterrupt
        commit(sink)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SplitSink, "commit", stop_at_third)
        prepare(config)


def test_a_finished_prep_of_touched_inputs_is_complete_and_of_changed_ones_refused(
    make_config: MakeConfig, large: Path
) -> None:
    config = make_config(large.parent, segment_megabytes=0.05)
    prepare(config)
    os.utime(large, ns=(5, 5))
    assert foresee(config).found == "already complete: nothing would be redone"
    assert json.loads((config.data_dir / "plan.json").read_text())["settings"]["inputs"][0]["mtime_ns"] > 5
    assert prepare(config).already_done
    assert json.loads((config.data_dir / "plan.json").read_text())["settings"]["inputs"][0]["mtime_ns"] == 5
    change_in_the_middle(large)
    for act in (foresee, prepare):
        with pytest.raises(
            PrepError,
            match=r"a finished prep.*a\.jsonl: its content.*--restart",
            check=lambda error: error.exit_code == 2,
        ):
            act(config)
    assert foresee(config, restart=True).found == "earlier work would be discarded"


def test_unfinished_work_on_touched_inputs_goes_on_and_on_changed_ones_is_refused(
    make_config: MakeConfig, large: Path, monkeypatch: pytest.MonkeyPatch, kit: SimpleNamespace
) -> None:
    config = make_config(large.parent, segment_megabytes=0.05)
    interrupt(config, monkeypatch)
    os.utime(large, ns=(5, 5))
    assert foresee(config).found == "2 segments finished, which would not be redone"
    shard = config.data_dir / "train/000000-000000.shard"
    written = shard.stat().st_mtime_ns
    whole = large.read_bytes()
    at = whole.index(b"energy", 66_000)  # in the second segment
    large.write_bytes(whole[:at] + b"ENERGY" + whole[at + 6 :])
    for act in (foresee, prepare):
        with pytest.raises(
            PrepError,
            match=r"unfinished work.*a\.jsonl: its content.*--restart",
            check=lambda error: error.exit_code == 2,
        ):
            act(config)
    large.write_bytes(whole)
    prepare(config)
    assert shard.stat().st_mtime_ns == written
    other = make_config(large.parent, "other", segment_megabytes=0.05)
    prepare(other)
    assert kit.data_bytes(other.data_dir) == kit.data_bytes(config.data_dir)


def test_work_without_recorded_contents_says_how_to_go_on(
    make_config: MakeConfig, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(large.parent, segment_megabytes=0.05)
    interrupt(config, monkeypatch)
    for path in (config.data_dir / ".prep/records").glob("*.json"):
        record = SegmentRecord.model_validate_json(path.read_text()).model_copy(update={"content": ""})
        path.write_text(record.model_dump_json())
    before = large.stat().st_mtime_ns
    large.touch()
    with pytest.raises(
        PrepError,
        match=r"a\.jsonl: its time of change.*touch -d @(\S+)",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(config)
    os.utime(large, ns=(before, before))
    prepare(config)


def test_a_finished_prep_of_a_version_that_hashed_times_into_its_key_is_complete(
    make_config: MakeConfig, large: Path
) -> None:
    config = make_config(large)
    prepare(config)
    for name, key in (("plan.json", "key"), ("manifest.json", "plan")):
        path = config.data_dir / name
        held = json.loads(path.read_text())
        held[key] = "0" * 32
        held.pop("contents", None)
        path.write_text(json.dumps(held))
    assert prepare(config).already_done


def test_a_dataset_folder_is_known_by_its_content_too(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    import datasets

    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": kit.make_texts(60)}).save_to_disk(str(folder))
    config = make_config([], sources=[{"dataset": str(folder)}])
    prepare(config)
    for path in folder.iterdir():
        os.utime(path, ns=(5, 5))
    assert prepare(config).already_done
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes().replace(b"energy", b"ENERGY", 1))
    with pytest.raises(
        PrepError, match=r"saved: its content.*--restart", check=lambda error: error.exit_code == 2
    ):
        prepare(config)


def test_added_and_removed_inputs_are_named(
    tmp_path: Path, make_config: MakeConfig, large: Path, kit: SimpleNamespace
) -> None:
    prepare(make_config(large.parent))
    kit.write_lines(large.parent / "b.jsonl", ["one more"])
    with pytest.raises(
        PrepError, match=r"b\.jsonl is a new input\)", check=lambda error: error.exit_code == 2
    ):
        prepare(make_config(large.parent))


def test_a_dry_run_foresees_that_another_command_writes_the_folder(
    make_config: MakeConfig, large: Path
) -> None:
    from data_prep.shards.manifest import FolderLock

    config = make_config(large)
    assert foresee(config).found == "nothing yet"
    assert not config.workdir.exists()
    with (
        FolderLock(config.data_dir),
        pytest.raises(
            PrepError, match="another command is writing", check=lambda error: error.exit_code == 2
        ),
    ):
        foresee(config)
    config.data_dir.with_name("file").write_text("")
    blocked = config.model_copy(update={"data": config.data_dir.with_name("file") / "data"})
    with pytest.raises(PrepError, match="cannot be made", check=lambda error: error.exit_code == 2):
        foresee(blocked)
