"""The files that a user names for a command's results: checked before the work, written in one way after it.

A regular file is replaced whole or not at all. A device, a FIFO, a socket, ``/dev/stdout``, ``/proc/self/fd/N`` and a
shell's process substitution are written through and stay what they are. The file a symbolic link points to is
replaced, and the link stays.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from calm_scale.config.base import ConfigError
from calm_scale.config.files import naming, new_file

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
