"""Whole files (calm_scale.config.files), which every room uses."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from calm_scale.config.files import write_atomically


def test_a_failed_write_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _write_often(path: Path, text: str) -> None:
    for _ in range(200):
        write_atomically(path, text)


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    texts = [letter * 5000 for letter in "abc"]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_text() in texts
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]
