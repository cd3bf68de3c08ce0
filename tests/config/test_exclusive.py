"""One command at a time in a folder (calm_scale.config.exclusive), with and without the file system's locks."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calm_scale.config import exclusive as module
from calm_scale.config.exclusive import OccupiedError, exclusive

HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
def refuse(file, how):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
from calm_scale.config.exclusive import OccupiedError, exclusive
try:
    with exclusive(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
except OccupiedError as error:
    print(error, flush=True)
"""
LIVE, OLD = 0.0, module.STALE_SECONDS + 5


def start_holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_holder(tmp_path / "lock")
    assert first_line(process) == "held\n"
    yield process
    end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def claim_of_another_machine(path: Path, age: float) -> Path:
    """The claim that a process of another machine wrote, its last sign of life ``age`` seconds ago."""
    me = module._this_process()
    other = dataclasses.replace(me, host="far", machine="far", pid=7, token="theirs")
    claim = path.with_name(f"{path.name}.3")
    claim.write_text(json.dumps(dataclasses.asdict(other)))
    os.utime(claim, (time.time() - age, time.time() - age))
    return claim


@pytest.mark.parametrize("number", [0, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_folder_is_held_once_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "lock"
    for _ in range(2):
        with exclusive(path):
            with (
                pytest.raises(OccupiedError, match=rf"process {os.getpid()} on .*, since 2.*wait for it"),
                exclusive(path),
            ):
                pass
            assert [claim.name for claim in tmp_path.glob("lock.*")] == ["lock.0"]
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_live_process_is_respected_and_a_killed_one_followed_at_once(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    for stopped in (False, True):
        if stopped:  # for longer than any sign of life may stay out
            holder.send_signal(signal.SIGSTOP)
            os.utime(tmp_path / "lock.0", (1.0, 1.0))
        with pytest.raises(OccupiedError, match=rf"process {holder.pid} on "), exclusive(tmp_path / "lock"):
            pass
    end(holder)
    begun = time.monotonic()
    with exclusive(tmp_path / "lock"):
        assert [claim.name for claim in tmp_path.glob("lock.*")] == ["lock.1"]
    assert time.monotonic() - begun < 60, "well before a claim is stale"


def test_of_several_that_follow_a_killed_one_exactly_one_wins(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    end(holder)
    takers = [start_holder(tmp_path / "lock") for _ in range(4)]
    try:
        lines = [first_line(taker) for taker in takers]
        winner = takers[lines.index("held\n")]
        assert sum(line == "held\n" for line in lines) == 1
        assert all(f"process {winner.pid} on " in line for line in lines if line != "held\n")
    finally:
        for taker in takers:
            end(taker)


def test_one_that_reads_the_claims_too_early_gives_way(
    tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen the same stale claim; the slower one's number is free again when it gets to it."""
    path = tmp_path / "lock"
    path.touch()
    create = module._create

    def overtaken(mine: Path, me: module.Holder) -> None:
        monkeypatch.setattr(module, "_create", create)
        claim_of_another_machine(path, LIVE)
        create(mine, me)

    monkeypatch.setattr(module, "_create", overtaken)
    with pytest.raises(OccupiedError, match="process 7 on far"), seen_alive(path), exclusive(path):
        pass
    assert [claim.name for claim in tmp_path.glob("lock.*")] == ["lock.3"]


@contextlib.contextmanager
def seen_alive(path: Path) -> Iterator[None]:
    """The other machine's process goes on giving signs of life."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path.with_name(f"{path.name}.3"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("locks", [True, False])
def test_a_process_of_another_machine_is_respected_while_it_gives_signs_of_life(
    tmp_path: Path, request: pytest.FixtureRequest, locks: bool
) -> None:
    """Also where this machine's lock is free: some file systems lock within one machine only."""
    if not locks:
        request.getfixturevalue("no_locks")
    path = tmp_path / "lock"
    claim = claim_of_another_machine(path, LIVE)
    with seen_alive(path), pytest.raises(OccupiedError, match="process 7 on far, since"), exclusive(path):
        pass
    assert claim.exists()


def test_a_process_of_another_machine_that_is_silent_is_waited_for_with_a_word_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.3)
    path = tmp_path / "lock"
    claim = claim_of_another_machine(path, module.STALE_SECONDS - 1.2)
    with exclusive(path):
        assert not claim.exists()
    word = capsys.readouterr().err
    assert "is in use by process 7 on far" in word
    assert word.count("waiting for it until it gives a sign of life or is given up") == 1


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}'])
def test_a_claim_that_names_nobody_goes_by_its_age(tmp_path: Path, text: str) -> None:
    """A full disk lets a name be made and takes no text."""
    claim = tmp_path / "lock.0"
    claim.write_text(text)
    with pytest.raises(OccupiedError, match="another process"), renewed(claim), exclusive(tmp_path / "lock"):
        pass
    os.utime(claim, (time.time() - OLD, time.time() - OLD))
    with exclusive(tmp_path / "lock"):
        assert not claim.exists()


@contextlib.contextmanager
def renewed(claim: Path) -> Iterator[None]:
    timer = threading.Timer(0.5, lambda: os.utime(claim))
    timer.start()
    yield
    timer.join()


def test_a_number_that_another_process_has_by_now_keeps_nobody_out(tmp_path: Path, no_locks: None) -> None:
    path = tmp_path / "lock"
    before = dataclasses.replace(module._this_process(), started="1")
    path.with_name("lock.0").write_text(json.dumps(dataclasses.asdict(before)))
    with exclusive(path):
        pass


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_holder_gives_signs_of_life_and_learns_that_it_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    path, told = tmp_path / "lock", list[str]()
    with exclusive(path, on_lost=told.append):
        os.utime(path.with_name("lock.0"), (1.0, 1.0))
        wait_until(lambda: path.with_name("lock.0").stat().st_mtime > time.time() - 60)
        claim_of_another_machine(path, LIVE)
        path.with_name("lock.0").unlink()
        wait_until(lambda: told)
    assert "was taken over by process 7 on far" in told[0]
    assert path.with_name("lock.3").exists()


def test_another_error_is_not_taken_for_missing_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"), exclusive(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("locks", [True, False])
def test_where_no_claim_can_be_written_the_lock_holds_alone_or_the_error_is_told(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """A folder of another user's, whose lock file is for everybody."""
    if not locks:
        request.getfixturevalue("no_locks")

    def refuse(path: Path, me: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "_create", refuse)
    if not locks:
        with pytest.raises(PermissionError), exclusive(tmp_path / "lock"):
            pass
        return
    with exclusive(tmp_path / "lock"), pytest.raises(OccupiedError), exclusive(tmp_path / "lock"):
        pass
