"""Megatron pairs that are damaged or misnamed: refused with a reason, and nothing is written."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from calm_scale.config import RunConfig
from data_prep.errors import ShardError
from data_prep.prep import prepare
from data_prep.prep.megatron import export_megatron, import_megatron, open_megatron, write_megatron
from data_prep.tokenizer import load_tokenizer

Import = Callable[[Path], object]


@pytest.fixture
def import_pair(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Import:
    """``import_pair(prefix)`` imports it into ``tmp_path/back``."""
    config = make_config(tmp_path, sequence_length=8)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    assert config.prep is not None
    prep = config.prep
    return lambda prefix: import_megatron(prefix, tmp_path / "back", tokenizer, prep, vocab_size=400)


def write_pair(prefix: Path, lengths: list[int], bounds: list[int]) -> Path:
    """A pair of 32 ids, whatever its index says."""
    np.arange(32, dtype="<u2").tofile(prefix.with_suffix(".bin"))
    write_megatron(prefix, np.dtype("<u2"), np.array(lengths, np.int32), np.array(bounds, np.int64))
    return prefix


@pytest.mark.parametrize("bounds", [[0, 2], [0, 1, 2], [0, 0, 2, 2]])
def test_whole_pairs_are_read(tmp_path: Path, import_pair: Import, bounds: list[int]) -> None:
    import_pair(write_pair(tmp_path / "pair", [8, 24], bounds))
    assert (tmp_path / "back/train/manifest.json").exists()


ODD = {
    "a bound beyond the end": ([8, 24], [0, 1, 9], "must go from 0 to its 2 sequences and are 0 to 9"),
    "the last sequence in no document": ([8, 24], [0, 1], "and are 0 to 1"),
    "the first sequence in no document": ([8, 24], [1, 2], "and are 1 to 2"),
    "no bounds": ([8, 24], [], "and are none"),
    "decreasing bounds": ([8, 24], [0, 2, 1, 2], "document 1 begins at sequence 2 and ends before, at 1"),
    "a negative bound": ([8, 24], [0, -1, 2], "document 0 begins at sequence 0 and ends before, at -1"),
    "a negative length": ([40, -8], [0, 1, 2], "sequence 1 has a length of -8"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, import_pair: Import, case: str) -> None:
    lengths, bounds, message = ODD[case]
    prefix = write_pair(tmp_path / "pair", lengths, bounds)
    with pytest.raises(ShardError, match=message) as raised:
        import_pair(prefix)
    assert str(raised.value).startswith(f"{prefix}.idx")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("size", [0, 5, 9, 12, 17, 20, 33, 34, 60])
def test_a_short_index_is_refused(tmp_path: Path, import_pair: Import, size: int) -> None:
    prefix = write_pair(tmp_path / "pair", [8, 24], [0, 1, 2])
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(ShardError, match=r"pair\.idx is (truncated|no Megatron index)"):
        import_pair(prefix)
    assert not (tmp_path / "back").exists()


def test_sequences_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "pair", [8, 24], [0, 1, 2])
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    struct.pack_into("<q", data, 34 + 8 + 8, 2)  # the second sequence begins inside the first
    index.write_bytes(data)
    with pytest.raises(ShardError, match="sequence 1 does not begin where the one before it ends"):
        open_megatron(prefix)


@pytest.fixture
def split(tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace) -> Path:
    """A small split."""
    config = make_config(kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(60)))
    prepare(config)
    return config.data_dir / "train"


@pytest.mark.parametrize("prefix", [".", "..", "/", "meg", "meg/.."])
def test_a_prefix_without_a_name_is_refused(
    tmp_path: Path, split: Path, import_pair: Import, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    (tmp_path / "meg").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ShardError, match=r"is a folder; add .* name", check=lambda error: error.exit_code == 2
    ):
        export_megatron(split, Path(prefix))
    with pytest.raises(
        ShardError,
        match=r"is a folder; add .* name|meg\.idx: No such file",
        check=lambda error: error.exit_code == 2,
    ):
        import_pair(Path(prefix))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_names_the_file_and_leaves_no_part(
    tmp_path: Path, split: Path, import_pair: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fill(number: int) -> None:
        raise OSError(*full.args)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as raised:
        patched.setattr(os, "fsync", fill)
        export_megatron(split, tmp_path / "out/pair")
    assert Path(raised.value.filename).parent == tmp_path / "out"
    assert not list((tmp_path / "out").iterdir())
    export_megatron(split, tmp_path / "out/pair")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as raised:
        patched.setattr(os, "fsync", fill)
        import_pair(tmp_path / "out/pair")
    assert raised.value.filename == str(tmp_path / "back/train/imported-000000.shard")
    assert not list((tmp_path / "back/train").iterdir())


def test_a_pair_is_written_beside_nothing_it_could_destroy(tmp_path: Path, split: Path) -> None:
    with pytest.raises(ShardError, match="is a device or a pipe", check=lambda error: error.exit_code == 2):
        export_megatron(split, Path("/dev/null"))
    with pytest.raises(
        ShardError, match="is inside a folder of shards", check=lambda error: error.exit_code == 2
    ):
        export_megatron(split, split / "pair")
    target = tmp_path / "elsewhere.bin"
    (tmp_path / "pair.bin").symlink_to(target)
    export_megatron(split, tmp_path / "pair")
    assert (tmp_path / "pair.bin").is_symlink() and target.stat().st_size > 0
