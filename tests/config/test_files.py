"""Files (calm_scale.config.files): written whole, read back, named by a user."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from calm_scale.config import ConfigError
from calm_scale.config.files import (
    is_regular,
    read_object,
    refuse_same_file,
    refuse_unwritable,
    write_atomically,
    write_output,
)


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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\xff", "[1]", "1" * 5000])
def test_a_damaged_document_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config.json: is damaged.*; download it again"):
        read_object(path, remedy="download it again")


def test_a_new_file_gets_the_umask_and_a_replaced_one_keeps_its_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_output(tmp_path / "deep" / "new.json", "one")
    finally:
        os.umask(old)
    new = tmp_path / "deep" / "new.json"
    assert (new.read_text(), stat.S_IMODE(new.stat().st_mode)) == ("one", 0o640)
    new.chmod(0o604)
    write_output(new, b"two")
    assert (new.read_bytes(), stat.S_IMODE(new.stat().st_mode)) == (b"two", 0o604)
    assert [path.name for path in new.parent.iterdir()] == ["new.json"]


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "dangling"
    target.write_text("old")
    link.symlink_to("real.json")
    dangling.symlink_to("later.json")
    for path in (link, dangling):
        refuse_unwritable(path)
        write_output(path, "new")
        assert path.is_symlink()
    assert target.read_text() == (tmp_path / "later.json").read_text() == "new"


def test_a_fifo_and_a_device_are_written_through_and_stay(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    refuse_unwritable(fifo)
    write_output(fifo, "through")
    reader.join(timeout=120)
    assert got == [b"through"] and stat.S_ISFIFO(fifo.stat().st_mode)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_output(link, "gone")
    assert link.is_symlink() and link.is_char_device() and not is_regular(link)


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
def test_an_open_descriptor_is_written_after_what_was_printed(tmp_path: Path, name: str) -> None:
    program = (
        "from pathlib import Path\nfrom calm_scale.config.files import *\n"
        f"path = Path({name!r}); refuse_unwritable(path)\n"
        "print('before'); write_output(path, 'text\\n'); print('after')"
    )
    for log in (
        tmp_path / "log",
        None,
    ):  # a regular file behind stdout must not be replaced under the shell's feet
        with (log or Path(os.devnull)).open("wb") as file:
            done = subprocess.run(
                [sys.executable, "-c", program],
                stdout=file if log else subprocess.PIPE,
                timeout=60,
                check=True,
            )
        assert (log.read_bytes() if log else done.stdout) == b"before\ntext\nafter\n"


def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, words in ((tmp_path, "is a folder"), (file / "x.json", "is a file, not a folder")):
        with pytest.raises(ConfigError, match=words):
            refuse_unwritable(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for path in (file, tmp_path / "new.json"):
        with pytest.raises(ConfigError, match="no permission"):
            refuse_unwritable(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_options_that_name_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()
    (tmp_path / "link").symlink_to("in.jsonl")
    same: list[tuple[dict[str, Path | None], dict[str, Path | None]]] = [
        ({"--json": Path("x"), "--html": tmp_path / "x"}, {}),
        ({"--out": Path("link")}, {"--jsonl": Path("in.jsonl")}),
    ]
    for written, read in same:
        with pytest.raises(ConfigError, match="name the same file"):
            refuse_same_file(written, read)
    refuse_same_file({"--json": Path("/dev/null"), "--html": Path("/dev/null")}, {"CONFIG": None})
    refuse_same_file({"--json": Path("x"), "--html": Path("y")}, {"CONFIG": Path("in.jsonl")})
