"""What of a run the container of its jobs must show: the mounts of a job script, and paths that no mount covers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.cluster import ContainerConfig, Mount, hidden, read_mount, unmountable


def mounts_of(container: ContainerConfig, folders: Sequence[Path]) -> list[str]:
    """The profile's mounts, after those that ``folders`` (absolute) need to be seen at their own places.

    Raises:
        ConfigError: a folder's name cannot be mounted, or the profile mounts something else over it.
    """
    own: list[Path] = []
    for folder in folders:
        while (missing := hidden(folder, [*_same_place(own), *_profile(container)])) is not None:
            if missing in own:
                raise ConfigError(
                    f"container.mounts: another folder is mounted over {missing}, which the jobs need at its own "
                    "place; take that mount out"
                )
            if (found := unmountable(str(missing), container.runtime)) or ":" in str(missing):
                raise ConfigError(
                    f"{missing}: {container.runtime} cannot mount a path with {found or repr(':')}; "
                    "choose another folder"
                )
            own.append(missing)
    return [*(f"{path}:{path}" for path in own), *container.mounts]


def unseen_paths(config: RunConfig, container: ContainerConfig, working_directory: Path) -> list[str]:
    """Paths of a run that its jobs would not find in the container: a line each, with the mount to add."""
    workdir = working_directory / config.workdir
    mounts = [
        read_mount(text, container.runtime) for text in mounts_of(container, [working_directory, workdir])
    ]
    found = []
    for key, path in _paths(config):
        place = Path(os.path.normpath(working_directory / path))
        missing = hidden(place, mounts)
        if missing is None:
            continue
        leads = f"{path} leads to {missing}, which" if missing != place else f"{path}"
        folder = missing.parent if missing.is_file() else missing
        found.append(
            f"{key}: {leads} is under no mount of the container; add {folder}:{folder} to container.mounts in the "
            "cluster profile"
        )
    return found


def _paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Every path of a run with its key; of a glob the folder in front of it."""
    yield "workdir", config.workdir
    named = {
        "tokenizer.path": config.tokenizer.path,
        "data": config.data,
        "lm.autoencoder": config.lm.autoencoder if config.lm is not None else None,
    }
    yield from ((key, path) for key, path in named.items() if path is not None)
    place = config.reading.stage_to
    if place is not None and "$" not in place:  # else only a node knows it
        yield "reading.stage_to", Path(place)
    for index, source in enumerate(config.prep.sources if config.prep is not None else ()):
        for text in source.paths:
            yield f"prep.sources.{index}.paths", _before_glob(text)
        if source.dataset is not None and _is_folder(source.dataset):
            yield f"prep.sources.{index}.dataset", Path(source.dataset)


def _before_glob(text: str) -> Path:
    return Path(*takewhile(lambda part: not set("*?[") & set(part), Path(text).parts))


def _is_folder(dataset: str) -> bool:
    """Whether a dataset is a folder and no name on a hub."""
    return dataset.startswith(("/", ".")) or Path(dataset).exists()


def _same_place(paths: Sequence[Path]) -> list[Mount]:
    return [Mount(path, path) for path in paths]


def _profile(container: ContainerConfig) -> list[Mount]:
    return [read_mount(text, container.runtime) for text in container.mounts]
