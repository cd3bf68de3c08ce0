"""The shard format: exact, checked, and refusing what does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import ShardError
from data_prep.shards import (
    HEADER_BYTES,
    ShardWriter,
    checksum_of,
    map_tokens,
    read_header,
    token_dtype,
)


def write(path: Path, pieces: list[np.ndarray], dtype: str = "<u4", max_id: int = 200_000):
    writer = ShardWriter(path, np.dtype(dtype), alignment=8, sequence_length=16, max_id=max_id)
    for piece in pieces:
        writer.append(piece)
    return writer.close()


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("sizes", [[5, 60, 1, 40], [16], [15, 1, 16], [0, 33]])
def test_stream_is_cut_into_sequences_and_a_tail(tmp_path: Path, dtype: str, sizes: list[int]) -> None:
    stream = np.arange(sum(sizes), dtype=np.uint32)
    pieces = np.split(stream, np.cumsum(sizes)[:-1])
    header, tail = write(tmp_path / "a.shard", pieces, dtype)
    assert header == read_header(tmp_path / "a.shard")
    assert header.num_sequences == len(stream) // 16
    stored = map_tokens(tmp_path / "a.shard", header)
    assert stored.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.concatenate([stored.ravel(), tail]), stream)
    assert header.checksum == checksum_of(tmp_path / "a.shard")
    assert [p.name for p in tmp_path.iterdir()] == ["a.shard"]


def test_less_than_a_sequence_leaves_no_file(tmp_path: Path) -> None:
    header, tail = write(tmp_path / "a.shard", [np.arange(15, dtype=np.uint32)])
    assert header is None
    assert len(tail) == 15
    assert not list(tmp_path.iterdir())


def test_dtype_is_chosen_from_the_true_maximum() -> None:
    assert token_dtype(65_535).name == "uint16"
    assert token_dtype(65_536).name == "uint32"
    assert token_dtype(300, "uint32").name == "uint32"
    with pytest.raises(ShardError, match="128255"):
        token_dtype(128_255, "uint16")


@pytest.mark.parametrize("bad", [65_536, 127_999, 128_000])
def test_forced_uint16_refuses_the_first_id_that_does_not_fit(tmp_path: Path, bad: int) -> None:
    ids = np.array([0, 65_535, bad], np.uint32)
    with pytest.raises(ShardError, match=str(bad)):
        write(tmp_path / "a.shard", [ids], "<u2")


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="128256"):
        write(tmp_path / "a.shard", [np.array([128_256], np.uint32)], max_id=128_255)


@pytest.mark.parametrize("at", [0, 9, 13, 30, 50, 60])
def test_a_damaged_header_is_noticed(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.shard"
    write(path, [np.arange(64, dtype=np.uint32)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"a\.shard"):
        read_header(path)


def test_cut_and_missing_files_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    write(path, [np.arange(64, dtype=np.uint32)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match="cut or changed"):
        read_header(path)
    path.write_bytes(path.read_bytes()[: HEADER_BYTES - 1])
    with pytest.raises(ShardError, match="not a calm-scale shard"):
        read_header(path)
    path.unlink()
    with pytest.raises(ShardError, match="missing"):
        read_header(path)
