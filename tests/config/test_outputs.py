"""A file that a user names is written whole, written through, or refused before the work."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from calm_scale.config import ConfigError
from calm_scale.config.outputs import is_regular, refuse_same_file, refuse_unwritable, write_output


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
    reader.join(timeout=20)
    assert got == [b"through"] and stat.S_ISFIFO(fifo.stat().st_mode)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_output(link, "gone")
    assert link.is_symlink() and link.is_char_device() and not is_regular(link)


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
def test_an_open_descriptor_is_written_after_what_was_printed(tmp_path: Path, name: str) -> None:
    program = (
        "from pathlib import Path\nfrom calm_scale.config.outputs import *\n"
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
