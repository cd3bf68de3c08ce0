"""The container of a run's jobs: its mounts, paths that no mount covers, and proof that it shows the same run folder.

``python -m launchers.slurm.container`` runs the proof inside; it imports no torch.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from calm_scale.config import CalmScaleError, ConfigError, RunConfig, load
from calm_scale.config.cluster import ContainerConfig, Mount, hidden, read_mount, unmountable
from calm_scale.config.files import wait_until_visible


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


OUTSIDE = "outside"
REMEDY = "add the folder to container.mounts in the cluster profile"


def difference(folder: Path, token: str, config: Path, workdir: Path, working_directory: Path) -> str:
    """What is not in here as it is outside; empty when nothing is.

    Args:
        folder: holds the token, in the run folder.
        config: the stored configuration.
        workdir: the run folder as the script calls it.
        working_directory: where the script runs.
    """
    if not config.is_file():
        return f"{config} is not there; {REMEDY}"
    if missing := wait_until_visible(lambda: _unread(folder / OUTSIDE, token)):
        return f"{missing}: this run folder is not the one outside; {REMEDY}"
    here = Path.cwd()
    if not working_directory.is_dir() or not here.samefile(working_directory):
        return f"the working directory is {here}, outside it is {working_directory}; {REMEDY}"
    try:
        stored = load(config).workdir
    except CalmScaleError as error:
        return f"the image's calm-scale does not read the stored configuration: {error}"
    if not stored.is_dir() or not stored.samefile(workdir):
        return f"workdir {stored} of {config} is another folder than {workdir}; {REMEDY}"
    return ""


def _unread(path: Path, token: str) -> str:
    try:
        return (
            "" if path.read_text().strip() == token else f"{path} holds another word than was written outside"
        )
    except OSError as error:
        return f"{path}: {error.strerror}"


def main(arguments: Sequence[str] | None = None) -> int:
    """One task; 0 when the token was read here and written for the script."""
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.container", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="in the run folder; holds the token")
    parser.add_argument("--token", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--working-directory", type=Path, required=True)
    options = parser.parse_args(arguments)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    problem = difference(
        options.folder, options.token, options.config, options.workdir, options.working_directory
    )
    if not problem:
        try:
            (options.folder / f"inside-{node}").write_text(f"{options.token}\n")
        except OSError as error:
            problem = (
                f"cannot write to the run folder {options.workdir}: {error.strerror}; mount it for writing"
            )
    if problem:
        sys.stderr.write(f"container: {node}: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
