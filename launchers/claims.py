"""What each layer of the environment claims about this process, read one layer at a time.

`launchers.environment` decides between them. A layer that is absent claims nothing; one that is half there
(`RANK` without `WORLD_SIZE`) is refused, because it is left over from another run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from launchers.errors import ContradictionError, LaunchError, with_values

MARK = "CALM_SCALE_LAUNCHER"
_TORCH_STYLE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    MARK,
)


@dataclass(frozen=True)
class Claim:
    """One layer's answer. ``group_rank`` of ``num_groups``: which launcher agent on which node started us."""

    source: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    group_rank: int
    num_groups: int
    values: Mapping[str, str]


def torch_style(env: Mapping[str, str]) -> Claim | None:
    """`RANK`/`WORLD_SIZE` as torchrun, deepspeed, our local launcher or a hand-written script set them."""
    values = _picked(env, _TORCH_STYLE)
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    if "RANK" not in env or "WORLD_SIZE" not in env:
        raise ContradictionError(
            with_values(
                "only one of RANK and WORLD_SIZE is set, probably left over from another run: unset it, "
                "or start the ranks with a launcher",
                values,
            )
        )
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
    local_size = _int_of(env, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), size)
    local_rank = _int_of(env, ("LOCAL_RANK",), rank % local_size if local_size else 0)
    groups = _int_of(env, ("GROUP_WORLD_SIZE", "CROSS_SIZE"), max(1, -(-size // max(local_size, 1))))
    group = _int_of(env, ("GROUP_RANK", "CROSS_RANK"), rank // max(local_size, 1))
    return _checked(Claim(_torch_source(env), rank, size, local_rank, local_size, group, groups, values))


def mpi(env: Mapping[str, str]) -> Claim | None:
    """Open MPI's, MPICH's or Intel MPI's variables, as `mpirun` sets them."""
    for rank, size, local_rank, local_size in (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank in env and size in env:
            num = _int(env, size)
            mine = _int_of(env, (local_size,), num)
            local = _int_of(env, (local_rank,), _int(env, rank) % max(mine, 1))
            groups = max(1, -(-num // max(mine, 1)))
            values = _picked(env, (rank, size, local_rank, local_size))
            # PMI_* is also what srun's pmi2 plugin sets: then the step below says the same thing.
            return _checked(
                Claim(
                    "mpi", _int(env, rank), num, local, mine, _int(env, rank) // max(mine, 1), groups, values
                )
            )
    return None


def slurm_step(env: Mapping[str, str]) -> Claim | None:
    """A task of a SLURM job step (`srun`). Step counts win over the job's: a step may be smaller."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    values = slurm_values(env)
    size = _int_of(env, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), 1)
    nodes = _int_of(env, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1)
    node = _int_of(env, ("SLURM_NODEID",), 0)
    counts_text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    counts = expand_counts(counts_text) if counts_text else []
    local_size = counts[node] if node < len(counts) else -(-size // max(nodes, 1))
    claim = Claim(
        "slurm",
        _int(env, "SLURM_PROCID"),
        size,
        _int_of(env, ("SLURM_LOCALID",), 0),
        local_size,
        node,
        nodes,
        values,
    )
    return _checked(claim)


def slurm_values(env: Mapping[str, str]) -> dict[str, str]:
    """The SLURM variables a decision is made from."""
    names = [
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_NNODES",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_RESTART_COUNT",
    ]
    return _picked(env, names)


def _torch_source(env: Mapping[str, str]) -> str:
    if env.get(MARK) == "local":
        return "local"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    return "deepspeed" if "CROSS_SIZE" in env else "env"


def _checked(claim: Claim) -> Claim:
    if not (0 <= claim.rank < claim.size and 0 <= claim.local_rank < claim.local_size <= claim.size):
        raise ContradictionError(
            with_values(
                f"{claim.source}: rank {claim.rank} of {claim.size}, local rank {claim.local_rank} of "
                f"{claim.local_size} is impossible",
                claim.values,
            )
        )
    return claim


def _picked(env: Mapping[str, str], names: tuple[str, ...] | list[str]) -> dict[str, str]:
    return {name: env[name] for name in names if name in env}


def _int(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError as error:
        raise LaunchError(f"environment variable {name} is {env[name]!r}, not a whole number") from error


def _int_of(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in env:
            return _int(env, name)
    return default


_SCONTROL_SECONDS = 10
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]*\Z")


def expand(host_list: str) -> list[str]:
    """Every host of a compressed list, in order.

    ``scontrol show hostnames`` answers where it can (it needs a SLURM configuration); `expand_here` is the
    fallback and gives the same answer.

    Raises:
        LaunchError: the list is empty or malformed.
    """
    if not host_list.strip():
        raise LaunchError(
            "the host list is empty: SLURM_JOB_NODELIST is unset or blank; run inside a job step"
        )
    return _by_scontrol(host_list) or expand_here(host_list)


def expand_here(host_list: str) -> list[str]:
    """`expand` without scontrol: any number of brackets per name, zero padding kept, rightmost runs fastest."""
    hosts = [
        host for entry in _split(host_list.strip(), host_list) for host in _expand_entry(entry, host_list)
    ]
    if not hosts:
        raise LaunchError(f"host list {host_list!r} names no host")
    return hosts


def first(host_list: str) -> str:
    """The first host of a compressed list: where rank 0 runs."""
    return expand(host_list)[0]


def expand_counts(counts: str) -> list[int]:
    """``2(x3),1`` → ``[2, 2, 2, 1]``: SLURM's form of tasks per node.

    Raises:
        LaunchError: the text is not of that form.
    """
    result: list[int] = []
    for entry in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", entry)
        if match is None:
            raise LaunchError(f"tasks-per-node list {counts!r} is not of the form 2(x3),1")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _by_scontrol(host_list: str) -> list[str] | None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    try:
        answer = subprocess.run(
            [scontrol, "show", "hostnames", host_list],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split() if answer.returncode == 0 else None


def _split(text: str, whole: str) -> list[str]:
    """Cut at the commas that stand outside brackets."""
    entries, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise LaunchError(
                f"host list {whole!r} has brackets that do not match at character {position + 1}"
            )
        if char == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    if depth:
        raise LaunchError(f"host list {whole!r} has a bracket that is never closed")
    entries.append(text[start:])
    return [entry.strip() for entry in entries if entry.strip()]


def _expand_entry(entry: str, whole: str) -> list[str]:
    literals = re.split(r"\[[^\]]*\]", entry)
    for literal in literals:
        if not _NAME.match(literal):
            raise LaunchError(f"host list {whole!r}: {entry!r} is not a host name")
    choices = [_numbers(inner, whole) for inner in re.findall(r"\[([^\]]*)\]", entry)]
    return [
        "".join(part for pair in zip(literals, (*picks, ""), strict=True) for part in pair)
        for picks in product(*choices)
    ]


def _numbers(inner: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in inner.split(","):
        match = _RANGE.match(piece.strip())
        if match is None:
            raise LaunchError(f"host list {whole!r}: [{inner}] is not a list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise LaunchError(f"host list {whole!r}: the range {low}-{high} runs backwards")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
