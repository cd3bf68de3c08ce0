"""Who am I among the processes of this prep: alone, or a rank of an MPI job.

A launcher that says "2 tasks" to a process whose MPI says "1" would have every task do all the work and write
the same files; that mismatch is refused before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from data_prep.errors import PrepMistakeError

# (variable, what set it), the innermost launcher first: a step inside a job, mpirun inside an allocation.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "PMI"),
    ("MPI_LOCALNRANKS", "mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
    ("SLURM_NTASKS", "SLURM"),
    ("SLURM_NPROCS", "SLURM"),
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class MpiMismatchError(PrepMistakeError):
    """The launcher's environment and MPI disagree about the number of processes."""


class Ranks(Protocol):
    """The collective operation a prep needs."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    rank: int = 0
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]


class MpiRanks:
    """The ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD

    @property
    def rank(self) -> int:
        """See ``Ranks``."""
        return int(self._comm.Get_rank())

    @property
    def size(self) -> int:
        """See ``Ranks``."""
        return int(self._comm.Get_size())

    def gather(self, value: Any) -> list[Any]:
        """See ``Ranks``."""
        return list(self._comm.allgather(value))


def detect_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Alone without a launcher; the MPI world under mpirun or ``srun --mpi=pmix``.

    Raises:
        MpiMismatchError: the environment names several tasks and MPI finds another number of them.
    """
    env = os.environ if environment is None else environment
    stated = _stated(env)
    if _torchrun(env) and (stated is None or stated[0] <= 1):
        raise MpiMismatchError(
            f"prep was started by torchrun (WORLD_SIZE={env['WORLD_SIZE']}): every process would do all the work; "
            "start it with `mpirun -n N`, `srun --mpi=pmix`, or alone with prep.workers: N"
        )
    if stated is None or (stated[0] <= 1 and not _under_mpi(env)):
        return Alone()
    try:
        ranks = MpiRanks()
    except (ImportError, RuntimeError) as error:
        raise MpiMismatchError(
            f"{stated[1]}={stated[0]} says this is one of {stated[0]} tasks, but MPI cannot be used ({error}); "
            f"install mpi4py with an MPI library, or unset {stated[1]} and use prep.workers"
        ) from None
    if ranks.size != stated[0]:
        facts = ", ".join(f"{k}={env[k]}" for k in (*(name for name, _ in _SIZES), *_RANKS) if k in env)
        raise MpiMismatchError(
            f"the environment says {stated[0]} tasks ({facts}), MPI says {ranks.size}: each task would do all the "
            "work and write the same files. Start prep with `srun --mpi=pmix` or `mpirun -n N`; for one process "
            f"inside an allocation, unset {stated[1]}. Nothing was written"
        )
    return ranks


def _stated(env: Mapping[str, str]) -> tuple[int, str] | None:
    for name, _ in _SIZES:
        if env.get(name, "").isdigit():
            return int(env[name]), name
    return None


def _under_mpi(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env


def _torchrun(env: Mapping[str, str]) -> bool:
    size = env.get("WORLD_SIZE", "")
    return "TORCHELASTIC_RUN_ID" in env and size.isdigit() and int(size) > 1
