"""Segments partition the lines, whoever reads them and from wherever."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep.inputs.lines
from data_prep.inputs.lines import ByteStream, LineStream

LINES = st.lists(st.text("ab{}é", max_size=12).map(str.encode), max_size=25)


def store(folder: Path, data: bytes, kind: str) -> Path:
    path = folder / f"x.{kind}"
    packed = {"plain": data, "gz": gzip.compress(data), "zst": zstandard.compress(data)}[kind]
    path.write_bytes(packed)
    return path


@settings(deadline=None, max_examples=120)
@given(
    lines=LINES,
    ends=st.booleans(),
    size=st.integers(1, 40),
    chunk=st.integers(1, 30),
    kind=st.sampled_from(["plain", "gz", "zst"]),
)
def test_segments_partition_the_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, size: int, chunk: int, kind: str
) -> None:
    """However the bytes arrive: a line, and a segment, may lie across many chunks."""
    with patch.object(ByteStream, "chunks", in_chunks_of(chunk)):
        check_partition(tmp_path_factory.mktemp("l"), lines, ends, size, kind)


def in_chunks_of(size: int) -> Callable[[ByteStream], Iterator[bytes]]:
    whole = ByteStream.chunks

    def chunks(stream: ByteStream) -> Iterator[bytes]:
        for chunk in whole(stream):
            for start in range(0, len(chunk), size):
                yield chunk[start : start + size]

    return chunks


def check_partition(folder: Path, lines: list[bytes], ends: bool, size: int, kind: str) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    path = store(folder, data, kind)
    last = max(0, (len(data) - 1) // size)
    in_order = LineStream(path, kind, size)
    joined = b""
    for segment in range(last + 1):
        expected = b"".join(b.data for b in in_order.blocks(segment))
        joined += expected
        alone = LineStream(path, kind, size, segment)
        blocks = list(alone.blocks(segment))
        assert b"".join(b.data for b in blocks) == expected
        assert alone.ended == in_order.ended
        if blocks:
            true_line = blocks[0].first_line + alone.lines_skipped
            assert true_line == 1 + data[: data.index(expected, len(joined) - len(expected))].count(b"\n")
        if in_order.ended:
            break
    assert joined == data
    assert in_order.ended


def test_small_blocks_give_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(b"x" * (i % 37) + b"\n" for i in range(500))
    path = store(tmp_path, data, "plain")
    monkeypatch.setattr(data_prep.inputs.lines, "BLOCK_BYTES", 50)
    stream = LineStream(path, "plain", 1000)
    blocks = [b for segment in range(10) for b in stream.blocks(segment)]
    assert b"".join(b.data for b in blocks) == data
    assert all(b.data.endswith(b"\n") for b in blocks)
    line = 1
    for block in blocks:
        assert block.first_line == line
        line += block.data.count(b"\n")


def test_a_line_over_the_limit_is_dropped_and_counted_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_prep.inputs.lines, "LINE_LIMIT", 10_000)
    monkeypatch.setattr(data_prep.inputs.lines, "BLOCK_BYTES", 4096)
    data = b"short\n" + b"y" * 3_000_000 + b"\nnext\n"
    stream = LineStream(store(tmp_path, data, "plain"), "plain", 1 << 40)
    blocks = list(stream.blocks(0))
    assert [(b.first_line, b.overlong) for b in blocks] == [(1, False), (2, True), (3, False)]
    assert blocks[-1].data == b"next\n"
    assert len(blocks[1].data) <= 4096
