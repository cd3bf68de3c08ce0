"""Job scripts from the Jinja templates in ``slurm/``: every value is shell-quoted unless a template says `raw`.

``launchers/slurm/scripts`` is a link to ``slurm/``, so that an installed package carries the templates too.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from calm_scale.config import ConfigError
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.run_folder import TRAINED
from launchers.errors import LaunchError
from launchers.inherited import CLIENT_NAMESPACES, CLUSTER_VARIABLES, RANK_NAMESPACES
from launchers.slurm.container import mounts_of
from launchers.slurm.layout import StageShape
from launchers.slurm.notice import limit_seconds
from launchers.slurm.record import EXCLUDE_SECONDS

TEMPLATES = (Path(__file__).parent / "scripts").resolve()
# sbatch expands `%j` and refuses backslashes in file names; a line break would end a directive.
_UNSAFE_IN_PATHS = "%\\\n\r\"'"


@dataclass(frozen=True)
class ScriptRun:
    """One run a script serves (an array task, or the only one)."""

    workdir: Path
    config: Path
    fingerprint: str
    progress: Path


@dataclass(frozen=True)
class _Raw:
    """Text that goes into the script as it stands."""

    text: str


def render(
    shape: StageShape,
    cluster: ClusterConfig,
    runs: Sequence[ScriptRun],
    *,
    title: str,
    folder: Path,
    working_directory: Path,
    notice: int,
    exclude: Sequence[str] = (),
) -> str:
    """The sbatch script of a stage.

    Args:
        runs: one run, or one per array task.
        title: the run's or the sweep's name.
        folder: where scripts and logs lie.
        working_directory: where the job starts (relative paths of the configuration count from there).
        notice: seconds before the time limit at which SLURM tells the batch shell; where the profile fixes none, the
            shell asks the ledger at the beginning of every life and tells itself earlier.
        exclude: nodes an earlier preflight found bad.

    Raises:
        ConfigError: a path sbatch cannot take.
        LaunchError: the templates are missing.
    """
    for path in (folder, working_directory, *(run.workdir for run in runs)):
        check_path(path)
    environment = _environment()
    container = cluster.container
    folders = dict.fromkeys([working_directory, TEMPLATES, *(run.workdir for run in runs)])
    mounts = mounts_of(container, list(folders)) if container else []
    values: dict[str, Any] = {
        "stage": shape.stage,
        "title": title,
        "cluster_name": cluster.name,
        "directives": [
            _Raw(text)
            for text in directives(shape, cluster, runs, title, folder, working_directory, notice, exclude)
        ],
        "runs": runs,
        "runs_eval_script": folder / "eval.sbatch",
        "python": cluster.python or ("python" if container else sys.executable),
        "host_python": sys.executable if container else cluster.python or sys.executable,
        "working_directory": working_directory,
        "shape": shape,
        "requeue": cluster.requeue,
        "keeps_clock": cluster.requeue.notice_seconds is None,
        "min_free_gigabytes": cluster.min_free_gigabytes,
        "environment": cluster.environment,
        "network_interface": cluster.network_interface,
        "site_lines": _site_lines(cluster),
        "cluster_variables": CLUSTER_VARIABLES,
        "client_namespaces": CLIENT_NAMESPACES,
        "rank_namespaces": RANK_NAMESPACES,
        "limit_seconds": limit_seconds(shape.time) % sys.maxsize,
        "exclude_seconds": EXCLUDE_SECONDS,
        "container": container,
        "container_mounts": ",".join(mounts),
        "mounts": mounts,
        "preflight": cluster.preflight,
        "link_check": _checks_links(shape, cluster),
        "eval_each_checkpoint": cluster.eval_each_checkpoint,
        "mpi": cluster.mpi,
        "mpirun_options": cluster.mpirun_options,
    }
    return environment.get_template(f"{shape.stage}.sbatch.j2").render(values)


def directives(
    shape: StageShape,
    cluster: ClusterConfig,
    runs: Sequence[ScriptRun],
    title: str,
    folder: Path,
    working_directory: Path,
    notice: int,
    exclude: Sequence[str] = (),
) -> list[str]:
    """``#SBATCH`` options, each quoted, in a fixed order."""
    array = len(runs) > 1
    log = folder / "logs" / (f"{shape.stage}-%A_%a.log" if array else f"{shape.stage}-%j.log")
    options: list[tuple[str, str | int | None]] = [
        ("job-name", f"{title}-{shape.stage}"),
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("constraint", cluster.constraint),
        ("nodes", shape.nodes),
        ("ntasks-per-node", shape.tasks_per_node),
        ("cpus-per-task", shape.cpus_per_task),
        ("mem", shape.memory),
        ("time", shape.time),
        ("array", f"0-{len(runs) - 1}" if array else None),
        ("chdir", str(working_directory)),
        ("output", str(log)),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{notice}"),
        ("exclude", ",".join(exclude) or None),
    ]
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options if value is not None]
    lines += ["--requeue", "--kill-on-invalid-dep=yes"]
    if shape.gpus_per_node and cluster.gpu_request != "none":
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        option = "gres=gpu:" if cluster.gpu_request == "gres" else "gpus-per-node="
        lines.append("--" + option + shlex.quote(f"{kind}{shape.gpus_per_node}"))
    stage_directives = getattr(cluster.stages, shape.stage).extra_directives
    return lines + list(cluster.extra_directives) + list(stage_directives)


def _checks_links(shape: StageShape, cluster: ClusterConfig) -> bool:
    """Whether the job measures its network first: training on several nodes, where the profile does not say."""
    several = shape.nodes > 1 and shape.stage in TRAINED
    return several and (shape.gpus_per_node > 0 if cluster.link_check is None else cluster.link_check)


def _site_lines(cluster: ClusterConfig) -> list[tuple[str, bool]]:
    """The profile's lines in order, each with whether its exit code is looked at.

    A line that is no command by itself (the beginning of an ``if``, a line that goes on) is run as it stands.
    """
    lines = [*(f"module load {shlex.quote(module)}" for module in cluster.modules), *cluster.setup]
    return [(line, _is_command(line)) for line in lines]


def _is_command(line: str) -> bool:
    if line.rstrip().endswith("\\") or "<<" in line:
        return False
    shell = shutil.which("bash", path=f"{os.environ.get('PATH', '')}{os.pathsep}{os.defpath}")
    if shell is None:
        return False
    return subprocess.run([shell, "-n", "-c", line], capture_output=True, check=False).returncode == 0


def check_path(path: Path) -> None:
    """Raises ConfigError for a path that sbatch would read as something else."""
    found = sorted({char for char in str(path) if char in _UNSAFE_IN_PATHS})
    if found:
        shown = " ".join(repr(char) for char in found)
        raise ConfigError(f"{path}: sbatch cannot take {shown} in a path; choose another workdir")


def _environment() -> jinja2.Environment:
    if not (TEMPLATES / "job.sbatch.j2").is_file():
        raise LaunchError(f"the job templates are missing: {TEMPLATES} holds no job.sbatch.j2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is shell, not HTML: `finalize` quotes for the shell
    )
    environment.globals.update(raw=_Raw, words=_words)
    return environment


def _words(items: Sequence[object], attribute: str | None = None) -> _Raw:
    """One quoted word per item (or per item's attribute), for a bash array."""
    values = [getattr(item, attribute) if attribute else item for item in items]
    return _Raw(" ".join(shlex.quote(str(value)) for value in values))


def _quoted(value: object) -> object:
    """What every ``{{ … }}`` passes through."""
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, jinja2.Undefined):  # left as it is, so that it raises
        return value
    return shlex.quote(str(value))
