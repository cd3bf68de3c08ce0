"""What the controller knows: squeue, never sacct (many sites, and our tests, have no accounting database)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from launchers.errors import LaunchError
from launchers.inherited import client_environment

_FORMAT = "%i|%T|%r|%L|%S|%N|%K|%F"
_SECONDS = 60
_NO_SLURM = ("configuration source", "configuration file", "Unable to contact slurm controller")
"""What the clients say where there is no cluster behind them."""
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT")


@dataclass(frozen=True)
class Queue:
    """An answer of the controller: this user's jobs by base id, or why there is none."""

    jobs: dict[str, list[QueuedJob]]
    error: str = ""


@dataclass(frozen=True)
class QueuedJob:
    """A job the controller still has. ``job_id`` is ``12`` or, for an array's task, ``12_3``."""

    job_id: str
    state: str
    reason: str
    time_left: str
    start: str
    nodes: str

    @property
    def base_id(self) -> str:
        """The id that the whole array answers to."""
        return self.job_id.split("_")[0]

    @property
    def is_active(self) -> bool:
        """Whether it holds nodes."""
        return self.state in ACTIVE


def available() -> bool:
    """Whether this machine can talk to a SLURM at all."""
    return shutil.which("squeue") is not None


def queued_jobs() -> dict[str, list[QueuedJob]]:
    """This user's jobs by base id. Empty without SLURM.

    Raises:
        LaunchError: SLURM is installed but does not answer.
    """
    if not available():
        return {}
    text = client(["squeue", "--noheader", "--me", "--array", f"--format={_FORMAT}"])
    found: dict[str, list[QueuedJob]] = {}
    for line in text.splitlines():
        if line.count("|") < 7:  # where several clusters answer, each begins with its name
            continue
        job_id, state, reason, left, start, nodes, *_ = line.split("|")
        job = QueuedJob(job_id, state, reason, left, start, nodes)
        found.setdefault(job.base_id, []).append(job)
    return found


def look() -> Queue:
    """The queue as it is; a SLURM that does not answer is told, not raised."""
    try:
        return Queue(queued_jobs())
    except LaunchError as problem:
        return Queue({}, str(problem))


def client(command: Sequence[str]) -> str:
    """Run a SLURM command and return its output.

    Of what schedulers export only the cluster's name reaches it (`launchers.inherited`): the rest would override what
    stands in the scripts, or change what it prints.

    Raises:
        LaunchError: it is missing, fails (quotes what it said) or does not answer, or there is no cluster behind it.
    """
    try:
        done = subprocess.run(
            list(command),
            env=client_environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} was not found: this machine has no SLURM client. On the cluster's login node it has; "
            "`calm-scale submit --dry-run` works without"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {_SECONDS} s: is the controller up?") from None
    if done.returncode and any(word in done.stderr for word in _NO_SLURM):
        raise LaunchError(
            f"SLURM does not work on this machine ({command[0]} finds no configuration or no controller): on the "
            "cluster's login node it should; `squeue` alone shows SLURM's own words"
        )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise LaunchError(f"{command[0]} failed ({done.returncode}): " + " ".join(said))
    return done.stdout.strip()
