"""Whole files and locks (calm_scale.config.files), which every room uses."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from calm_scale.config.files import lock, write_atomically


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


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as mine, (tmp_path / "lock").open("a") as other:
        assert lock(mine)
        assert not lock(other)
        mine.close()
        assert lock(other, wait=True)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_stops_nobody(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    wait: bool,
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as file:
        assert lock(file, wait=wait)
    assert f"{tmp_path}: its file system has no locks" in capsys.readouterr().err


def test_another_error_is_not_taken_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match="Input/output"):
        lock(file)
