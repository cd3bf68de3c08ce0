"""A full disk: nothing torn stays, nothing raises, and what waited is written in order."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calm_scale.record import json_lines
from calm_scale.record.json_lines import LineWriter


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: the write that crosses it is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "a.jsonl", list[str]()
    monkeypatch.setattr(json_lines, "MOST_KEPT", 3)
    writer = LineWriter(path, said.append)
    writer.add("first")
    with largest_file(len("first\n") + 3):
        for number in range(4):
            writer.add(f"line {number}")
        writer.sync()
        assert path.read_text() == "first\n"
    assert len(said) == 1 and "File too large. Training goes on" in said[0]
    writer.add("last")
    assert path.read_text() == "first\nline 2\nline 3\nlast\n"
    assert "3 lines that waited are there, 2 older ones are lost" in said[1]
    with largest_file(path.stat().st_size):
        writer.add("never")
        writer.close()
    assert len(said) == 4 and said[3].endswith("lines lost: 1")
