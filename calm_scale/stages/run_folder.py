"""A run's folder: where the resolved configuration is kept, so that a folder alone tells what ran there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from calm_scale.checkpoint.files import sync_folder
from calm_scale.config import ConfigError, RunConfig, load, to_yaml

CONFIG_FILE = "config.yaml"


def store_config(config: RunConfig, folder: Path | None = None) -> Path:
    """Write the resolved configuration into the run folder (atomically; a later attempt replaces it).

    ``folder``: where the run folder is being put together, if not in its place yet.
    """
    folder = folder or config.workdir
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / CONFIG_FILE
    partial = folder / f".{CONFIG_FILE}.{os.getpid()}"
    partial.write_text(to_yaml(config), encoding="utf-8")
    partial.replace(target)
    return target


def refuse_unless_empty(folder: Path, what: str) -> None:
    """Raises ConfigError where ``what`` cannot have ``folder`` to itself."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder for {what}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; give {what} a folder of its own")
    if _partial(folder).exists():
        raise ConfigError(
            f"{_partial(folder)}: another command is writing {what} there, or one was killed; remove it if none is"
        )


@contextlib.contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` (new or empty) when all is written and on the disk.

    A failure leaves nothing; a kill leaves ``<folder>.part``, which nobody takes for the whole.
    """
    partial = _partial(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
        partial.replace(folder)
        sync_folder(partial.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(folder: Path) -> Path:
    folder = folder.absolute()
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
    return (folder / CONFIG_FILE).is_file() or (folder / "slurm").is_dir()


def config_of(target: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file or of a run folder."""
    if not target.is_dir():
        return load(target, overrides)
    stored = target / CONFIG_FILE
    if not stored.is_file():
        raise ConfigError(f"{target}: not a run folder, it holds no {CONFIG_FILE}")
    return load(stored, overrides)
