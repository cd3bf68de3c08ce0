"""Folders that commands write: the resolved configuration of a run, and new folders that appear only when whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from calm_scale.checkpoint.file_list import CARD, sync_folder
from calm_scale.config import ConfigError, RunConfig, to_yaml
from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.config.files import refuse_unwritable, write_atomically
from calm_scale.config.run_folder import CONFIG_FILE, RunFolder

_LOCK = ".writing"


def store_config(config: RunConfig, folder: Path | None = None) -> Path:
    """Write the resolved configuration into the run folder (atomically; a later attempt replaces it).

    ``folder``: where the run folder is being put together, if not in its place yet.
    """
    folder = folder or config.workdir
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / CONFIG_FILE
    write_atomically(target, to_yaml(config))
    return target


def make_way(folder: Path, what: str) -> None:
    """Check that ``folder`` is free for ``what``; remove, and report, what a killed command left of it.

    Raises:
        ConfigError: the folder is in use, cannot be written, is the current one, or lies in a checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder for {what}")
    real = folder.resolve()
    if real == Path.cwd():
        raise ConfigError(f"{folder}: is the current folder; name another one for {what}")
    inside = next((parent for parent in real.parents if (parent / CARD).is_file()), None)
    if inside is not None:
        raise ConfigError(
            f"{folder}: is inside {inside}, a checkpoint or an export; choose a folder elsewhere for {what}"
        )
    refuse_unwritable(real / CONFIG_FILE)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; give {what} a folder of its own")
    partial = _partial(folder)
    if not partial.exists():
        return
    try:
        with exclusive(partial / _LOCK, create=False):
            sys.stderr.write(f"{partial}: left by a command that was killed; removed\n")
            shutil.rmtree(partial)
    except FileNotFoundError:
        raise ConfigError(
            f"{partial}: already exists and was not created by calm-scale, so {what} cannot be written; move it, or "
            "choose another folder"
        ) from None
    except OccupiedError as error:
        raise ConfigError(
            f"{partial}: another command is writing {what} there ({error.holder}); wait for it, or end it first"
        ) from None


@contextlib.contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` (new or empty) when all is written and on the disk.

    A failure, SIGINT and SIGTERM leave nothing; SIGKILL leaves ``<folder>.part``, which no command reads
    and the next one removes once its lock is free. Must be entered by the main thread.
    """
    folder = folder.resolve()
    partial = _partial(folder)
    partial.mkdir(parents=True)
    with _exit_on_signals():
        try:
            with exclusive(partial / _LOCK):
                yield partial
                (partial / _LOCK).unlink()
            _sync(partial)
            partial.replace(folder)
            sync_folder(partial.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the process by SystemExit, even where a library catches it on its way up."""
    caught: list[int] = []

    def leave(number: int, _: object) -> None:
        if not caught:  # a second one does not disturb the cleaning up
            caught.append(number)
            raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:
        if caught:
            raise SystemExit(128 + caught[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _partial(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(folder.name + ".part")


def _sync(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def runs_in(folder: Path) -> list[Path]:
    """The run folder itself, or the runs of a sweep's folder.

    Raises:
        ConfigError: it is neither.
    """
    if _is_run(folder):
        return [folder]
    found = sorted(child for child in folder.iterdir() if _is_run(child)) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder}: not a run folder (it holds neither {CONFIG_FILE} nor slurm/)")
    return found


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or RunFolder(folder).slurm.is_dir()
