"""Files: written whole or not at all, read back with errors for people, named by a user, or seen late.

``CALM_SCALE_FILE_WAIT_SECONDS`` (30 unless set) bounds every wait for a file that another machine wrote.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from calm_scale.config.errors import CalmScaleError, ConfigError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file written beside ``path``, which takes that name once all of it is on the disk; after a failure it is gone.

    ``path`` holds either what it held or all that was written, also after a power cut. Several processes may write it
    at once; the last one wins.

    Raises:
        OSError: names ``path``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """All of a ``new_file`` at once, in UTF-8."""
    with new_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError that says no file (a write to a full disk) say ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


M = TypeVar("M", bound=BaseModel)
_SHOWN = 5


def read_object(
    path: Path, *, remedy: str = "", raises: Callable[[str], CalmScaleError] = ConfigError
) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        remedy: what to do about a file that is missing or damaged.
        raises: makes the error of its text.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise raises(_message(path, f"cannot be read: {error.strerror}", remedy)) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise raises(_message(path, f"is damaged, not JSON: {error}", remedy)) from None
    if not isinstance(raw, dict):
        raise raises(_message(path, f"is damaged: a JSON {type(raw).__name__}, not an object", remedy))
    return raw


def checked(
    model: type[M],
    raw: object,
    where: object,
    *,
    remedy: str = "",
    raises: Callable[[str], CalmScaleError] = ConfigError,
) -> M:
    """``raw`` as a model; ``where`` says whose values they are (a file, a key of it)."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise raises(_message(where, f"does not fit: {findings(error)}", remedy)) from None


def findings(error: ValidationError) -> str:
    """What pydantic found, in one line: ``key.path: what is wrong; …`` (the first five)."""
    found = error.errors(include_url=False, include_context=False)
    lines = [
        f"{'.'.join(map(str, item['loc']))}: {_in_words(item['type'], item['msg'])}".removeprefix(": ")
        for item in found[:_SHOWN]
    ]
    return "; ".join(lines) + (f"; … and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _in_words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown key"
    return "missing" if kind == "missing" else message.removeprefix("Value error, ")


def _message(where: object, what: str, remedy: str) -> str:
    return f"{where}: {what}" + (f"; {remedy}" if remedy else "")


_MOST_LINKS = 40


def refuse_unwritable(path: Path) -> None:
    """Raises ConfigError where ``path`` could not be written; nothing is created or opened."""
    if _own_descriptor(path) is not None:
        return
    target = _target(path)
    if target.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if target.exists():
        if not os.access(target, os.W_OK):
            raise ConfigError(f"{path} cannot be written: you have no permission to")
        return
    there = next(parent for parent in target.parents if parent.exists())
    if not there.is_dir():
        raise ConfigError(f"{path}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: you have no permission to write into {there}")


def refuse_same_file(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raises ConfigError where two options of one command name the same file and one of them would write it.

    Args:
        written, read: paths by the options that name them; None where an option was not given. A device such as
            ``/dev/null`` may be named twice.
    """
    seen = {_identity(path): option for option, path in read.items() if path is not None}
    for option, path in written.items():
        if path is None or (_own_descriptor(path) is None and path.is_char_device()):
            continue
        other = seen.setdefault(_identity(path), option)
        if other != option:
            raise ConfigError(f"{other} and {option} name the same file: {path}; give {option} another one")


def is_regular(path: Path) -> bool:
    """Whether ``path`` names, or will name, a file that stays; not a pipe, a device or an open descriptor."""
    return _own_descriptor(path) is None and (not path.exists() or path.is_file())


def write_output(path: Path, content: str | bytes) -> None:
    """Write all of ``content`` (a text in UTF-8) to the file that the user named; missing folders are made.

    A new file gets the permissions of the user's umask and its folder; a file that is replaced keeps its own.

    Raises:
        OSError: names ``path``.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor = _own_descriptor(path)
    if descriptor is not None:
        with naming(path):
            _write_through(descriptor, data)
        return
    target = _target(path)
    if target.exists() and (not target.is_file() or not os.access(target.parent, os.W_OK)):
        with naming(path), target.open("wb", buffering=0) as file:
            _write_all(file.fileno(), data)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_file(target) as whole:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(whole.fileno(), stat.S_IMODE(target.stat().st_mode))
        whole.write(data)


def _write_through(descriptor: int, data: bytes) -> None:
    """Into an open descriptor of this process, after what was printed there before."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _write_all(descriptor, data)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _target(path: Path) -> Path:
    """What a link points to; a path that is no link, as an absolute one."""
    return path.resolve() if path.is_symlink() else path.absolute()


def _own_descriptor(path: Path) -> int | None:
    """N where ``path`` names an open descriptor N of this process (``/dev/stdout``, ``/dev/fd/N``), else None."""
    ours = {Path(f"/proc/{own}/fd").resolve() for own in ("self", "thread-self")}
    place = path.absolute()
    for _ in range(_MOST_LINKS):
        folder = place.parent.resolve()
        if folder in ours and place.name.isdigit():
            return (
                int(place.name)
                if (folder / place.name).exists() or (folder / place.name).is_symlink()
                else None
            )
        if not place.is_symlink():
            return None
        place = folder / place.readlink()
    return None


def _identity(path: Path) -> object:
    """Equal for two names of one file."""
    try:
        found = path.stat()
    except OSError:
        return path.resolve()
    return found.st_dev, found.st_ino


FILE_WAIT_VARIABLE = "CALM_SCALE_FILE_WAIT_SECONDS"
FILE_WAIT_SECONDS = 30.0
FILE_NOTICE_SECONDS = 2.0
"""Whoever waits longer says for what."""
FILE_POLL_SECONDS = 0.25


class LateFileError(CalmScaleError):
    """A file that one process wrote has not become visible to another in time."""


def file_wait_seconds() -> float:
    """How long a late file is waited for.

    Raises:
        ConfigError: the variable is no number of seconds.
    """
    text = os.environ.get(FILE_WAIT_VARIABLE, "")
    try:
        seconds = float(text) if text else FILE_WAIT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{FILE_WAIT_VARIABLE}={text}: give a number of seconds")
    return seconds


def wait_until_visible(missing: Callable[[], str]) -> str:
    """Ask ``missing`` what is not visible yet until it says nothing or the time is up; its last answer."""
    limit, started, told = file_wait_seconds(), time.monotonic(), False
    while what := missing():
        waited = time.monotonic() - started
        if waited >= limit:
            return what
        if waited >= FILE_NOTICE_SECONDS and not told:
            told = True
            sys.stderr.write(
                f"not visible here yet: {what}; waiting up to {limit:g} s ({FILE_WAIT_VARIABLE})\n"
            )
            sys.stderr.flush()
        time.sleep(min(FILE_POLL_SECONDS, limit - waited))
    return ""
