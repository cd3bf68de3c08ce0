"""Whether a container shows the run folder of the job outside, and resolves its paths alike; no torch.

Run by the job script as one task on every node, inside the container: reads the token that the script has written, and
writes it to ``FOLDER/inside-NODE`` for the script to read. A folder of the image, or a copy, fails one of the two.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from calm_scale.config import CalmScaleError, load
from calm_scale.config.files import wait_until_visible

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
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.same_folder", description=__doc__)
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
