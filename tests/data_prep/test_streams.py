"""Truncated and corrupt archives, and every legal form of zstd and gzip."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from data_prep.errors import SourceError
from data_prep.inputs.lines import ByteStream

TEXT = b"".join(b'{"text": "record %d"}\n' % i for i in range(5000))
SKIPPABLE = struct.pack("<II", 0x184D2A53, 700_000) + bytes(700_000)


def frame(data: bytes, checksum: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(data)


def read(path: Path, kind: str) -> tuple[bytes, ByteStream]:
    stream = ByteStream(path, kind)
    return b"".join(stream.chunks()), stream


@pytest.mark.parametrize(
    "data",
    [
        frame(TEXT),
        frame(TEXT[:1000]) + frame(TEXT[1000:]),
        frame(b"") + frame(TEXT) + frame(b""),
        SKIPPABLE + frame(TEXT[:7]) + SKIPPABLE + frame(TEXT[7:]) + SKIPPABLE,
        b"".join(frame(TEXT[i : i + 999]) for i in range(0, len(TEXT), 999)),
    ],
    ids=["one frame", "two frames", "empty frames", "skippable frames", "many frames"],
)
def test_every_legal_zstd_file_is_read_whole(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(data)
    text, stream = read(path, "zst")
    assert text == TEXT
    assert stream.notes["zstd_frames_without_checksum"] == 0


@pytest.mark.parametrize("padding", [b"", bytes(5000)])
def test_multi_member_gzip_is_read_whole(tmp_path: Path, padding: bytes) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT[:100]) + padding + gzip.compress(TEXT[100:]) + padding)
    assert read(path, "gz")[0] == TEXT


@pytest.mark.parametrize("share", [0.01, 0.6, 0.999])
@pytest.mark.parametrize(("kind", "pack"), [("zst", frame), ("gz", gzip.compress)])
def test_a_truncated_archive_is_never_taken_for_complete(
    tmp_path: Path, kind: str, pack: Callable[[bytes], bytes], share: float
) -> None:
    whole = pack(TEXT)
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SourceError, match=rf"cut\.{kind} is (truncated|corrupt).*after \d+ bytes"):
        read(path, kind)


def test_every_cut_of_a_zstd_file_is_noticed(tmp_path: Path) -> None:
    whole = frame(TEXT[:500]) + frame(TEXT[500:900])
    boundary = len(frame(TEXT[:500]))
    path = tmp_path / "cut.zst"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size == boundary:
            continue  # the end of a frame is a legal end of file
        with pytest.raises(SourceError):
            read(path, "zst")


@pytest.mark.parametrize(("kind", "pack"), [("zst", frame), ("gz", gzip.compress)])
def test_a_flipped_byte_is_noticed(tmp_path: Path, kind: str, pack: Callable[[bytes], bytes]) -> None:
    data = bytearray(pack(TEXT))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / f"flip.{kind}"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"flip\.{kind} is (corrupt|truncated)"):
        read(path, kind)


def test_frames_without_checksum_are_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(frame(TEXT[:50], checksum=False) + frame(TEXT[50:]))
    _, stream = read(path, "zst")
    assert stream.notes == {"zstd_frames": 2, "zstd_frames_without_checksum": 1}


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_empty_and_foreign_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    for data in (b"", b"plain text, not compressed at all", bytes(300), bytes(1_000_000)):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=rf"a\.{kind} is"):
            read(path, kind)


def test_padding_before_the_first_gzip_member_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(bytes(300) + gzip.compress(TEXT))
    with pytest.raises(SourceError, match=r"a\.gz is corrupt"):
        read(path, "gz")
