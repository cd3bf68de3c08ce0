"""The compressed form of a split: what is damaged is found, and nothing is lost or left over when it is made."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError, ShardError
from data_prep.prep import prepare
from data_prep.prep.prep_report import verify_split
from data_prep.shards import compressed
from data_prep.shards.compressed import compress_split, expand_split
from data_prep.shards.manifest import FolderLock, Manifest
from data_prep.shards.reading import ShardDataset

_TAIL = struct.Struct("<QQ8s")


@pytest.fixture
def split(tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace) -> Path:
    """A split of a few shards."""
    path = kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(200))
    config = make_config(path, segment_megabytes=0.02)
    prepare(config)
    return config.data_dir / "train"


TABLES = {
    "twice the rows": lambda rows, at, size: (2 * rows, at),
    "fewer rows": lambda rows, at, size: (max(1, rows // 512), at),
    "no rows": lambda rows, at, size: (0, at),
    "one byte on": lambda rows, at, size: (rows, at + 1),
    "far away": lambda rows, at, size: (rows, at + (1 << 40)),
    "at the end": lambda rows, at, size: (rows, size),
}


@pytest.mark.parametrize("frame_bytes", [1 << 10, 1 << 20])
@pytest.mark.parametrize("case", TABLES)
def test_a_changed_table_of_frames_is_found(
    split: Path, monkeypatch: pytest.MonkeyPatch, case: str, frame_bytes: int
) -> None:
    monkeypatch.setattr(compressed, "_FRAME_BYTES", frame_bytes)
    compress_split(split)
    assert verify_split(split).ok
    shard = split / Manifest.read(split).shards[0].name
    data = shard.read_bytes()
    rows, at, magic = _TAIL.unpack(data[-_TAIL.size :])
    shard.write_bytes(data[: -_TAIL.size] + _TAIL.pack(*TABLES[case](rows, at, len(data)), magic))
    assert any(shard.name in problem for problem in verify_split(split).problems)
    with pytest.raises(ShardError, match=f"{shard.name} is damaged: its table of frames"):
        ShardDataset(split, 64)


def test_a_frame_of_another_size_is_found(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "_FRAME_BYTES", 1 << 10)
    compress_split(split)
    shard = split / Manifest.read(split).shards[0].name
    data = shard.read_bytes()
    at = _TAIL.unpack(data[-_TAIL.size :])[1]
    second = at + 8 + 8  # where the second frame begins
    shard.write_bytes(
        data[:second] + struct.pack("<Q", struct.unpack_from("<Q", data, second)[0] + 1) + data[second + 8 :]
    )
    assert any(shard.name in problem for problem in verify_split(split).problems)
    with pytest.raises(ShardError, match=r"is damaged \(frame 0"):
        ShardDataset(split, 64)[0]


def shards_of(split: Path) -> dict[str, bytes]:
    """Every file of a split but its manifest."""
    return {path.name: path.read_bytes() for path in split.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("turn", [compress_split, expand_split])
def test_a_damaged_shard_is_not_replaced(split: Path, turn: Callable[[Path], Manifest]) -> None:
    if turn is expand_split:
        compress_split(split)
    manifest = Manifest.read(split)
    shard = split / manifest.shards[2].name
    data = bytearray(shard.read_bytes())
    data[-200 if turn is expand_split else -20] ^= 1
    shard.write_bytes(data)
    before = shards_of(split)
    with pytest.raises(ShardError, match=f"{shard.name} is damaged"):
        turn(split)
    assert shards_of(split) == before
    assert Manifest.read(split) == manifest


def test_a_shard_of_another_split_is_not_compressed(split: Path) -> None:
    first, second = (split / entry.name for entry in Manifest.read(split).shards[:2])
    second.write_bytes(first.read_bytes())
    with pytest.raises(ShardError, match=f"{second.name} does not belong to its manifest"):
        compress_split(split)
    assert not list(split.glob("*.zst"))


@pytest.mark.parametrize("turn", [compress_split, expand_split])
def test_a_full_disk_names_the_file_and_leaves_no_part(
    split: Path, monkeypatch: pytest.MonkeyPatch, turn: Callable[[Path], Manifest]
) -> None:
    if turn is expand_split:
        compress_split(split)
    before = shards_of(split)
    synced: list[int] = []

    def fill(number: int) -> None:
        synced.append(number)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match="No space") as raised:
        turn(split)
    assert Path(raised.value.filename).parent == split
    assert shards_of(split) == before


def names_of(split: Path) -> list[str]:
    """The files of a split but its manifest."""
    return sorted(shards_of(split))


@pytest.mark.parametrize("again", [compress_split, expand_split])
def test_what_an_end_before_the_removal_left_is_removed_by_the_next_call(
    split: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[Path], Manifest]
) -> None:
    plain = names_of(split)

    def die(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            compress_split(split)
    (split / "000000-000000.shard.zst.part").write_bytes(b"cut")
    assert set(plain) < set(names_of(split))
    manifest = again(split)
    assert names_of(split) == sorted(entry.name for entry in manifest.shards)
    assert verify_split(split).ok


def test_a_shard_beside_a_damaged_one_is_kept(split: Path) -> None:
    shard = split / Manifest.read(split).shards[0].name
    plain = shard.read_bytes()
    compress_split(split)
    shard.write_bytes(plain)
    compressed = shard.with_name(shard.name + ".zst")
    data = bytearray(compressed.read_bytes())
    data[-200] ^= 1
    compressed.write_bytes(data)
    with pytest.raises(ShardError, match=f"{compressed.name} is damaged"):
        compress_split(split)
    assert shard.read_bytes() == plain


@pytest.mark.parametrize("turn", [compress_split, expand_split])
def test_nothing_is_compressed_or_expanded_while_another_command_writes(
    split: Path, turn: Callable[[Path], Manifest]
) -> None:
    if turn is expand_split:
        compress_split(split)
    before = shards_of(split)
    with (
        FolderLock(split.parent),
        pytest.raises(
            PrepError, match=f"process {os.getpid()} on ", check=lambda error: error.exit_code == 2
        ),
    ):
        turn(split)
    assert shards_of(split) == before
    turn(split)
    assert verify_split(split).ok


def test_a_folder_without_a_split_gets_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="is missing"):
        compress_split(tmp_path / "none/train")
    assert not (tmp_path / "none").exists()
