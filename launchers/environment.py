"""Who am I? One documented precedence over everything that launchers and schedulers export.

1. **launcher**: our local launcher, torchrun, deepspeed, a hand-set ``RANK``/``WORLD_SIZE``; then MPI's variables
2. **step**: the SLURM job step this process is a task of (`srun`)
3. **job**: a bare process, alone, inside an allocation or outside one: rank 0 of 1

The first layer that speaks wins; each layer below must be *compatible*: it has one task, or says the same rank and
size, or its tasks are the launcher's agents (one torchrun per node). Anything else is refused with all values.
``CALM_SCALE_LAUNCHER=none`` says "alone, whatever the environment holds".
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launchers import claims, meeting
from launchers.claims import Claim, first
from launchers.errors import ContradictionError, InterfaceError, LaunchError, with_values

MASTER_ADDRESS = "CALM_SCALE_MASTER_ADDR"
MASTER_PORT = "CALM_SCALE_MASTER_PORT"
GPUS = "CALM_SCALE_GPUS"
ALLOW_LOOPBACK = "CALM_SCALE_ALLOW_LOOPBACK"


@dataclass(frozen=True)
class RankFacts:
    """Everything a process needs to join its world.

    ``launcher`` is one of local, torchrun, deepspeed, env, mpi, slurm, none. ``restart_count`` counts the earlier
    lives of this job (requeues plus torchrun restarts). With ``world_size`` 1 the master is this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    launcher: str
    job_id: str | None
    restart_count: int


def facts(
    env: Mapping[str, str] | None = None, resolve: Callable[[str], str | None] | None = None
) -> RankFacts:
    """The facts of this process by the precedence above.

    Raises:
        ContradictionError: layers disagree; the message prints every value.
        LaunchError: a value is missing or malformed, or a world over several nodes would meet on loopback.
    """
    env = os.environ if env is None else env
    claim = _decide(env)
    address, port = _master(claim, env)
    if claim.num_groups > 1 and env.get(ALLOW_LOOPBACK) != "1":
        _refuse_unreachable(address, resolve or _resolve, claim)
    return RankFacts(
        rank=claim.rank,
        world_size=claim.size,
        local_rank=claim.local_rank,
        local_world_size=claim.local_size,
        node_rank=claim.group_rank,
        num_nodes=claim.num_groups,
        master_addr=address,
        master_port=port,
        launcher=claim.source,
        job_id=env.get("SLURM_JOB_ID"),
        restart_count=_count(env, "SLURM_RESTART_COUNT") + _count(env, "TORCHELASTIC_RESTART_COUNT"),
    )


def gpus_of_node(env: Mapping[str, str] | None = None) -> int:
    """GPUs of this node that the job asked for, as its script or SLURM says; 0 when neither does."""
    env = os.environ if env is None else env
    return _count(env, GPUS) if GPUS in env else _count(env, "SLURM_GPUS_ON_NODE")


def port_candidates(env: Mapping[str, str] | None = None, count: int = meeting.NUM_CANDIDATES) -> list[int]:
    """Ports all ranks of this step agree on, in the order to try when one is taken: the chosen one first."""
    env = os.environ if env is None else env
    chosen = _port(env, MASTER_PORT)
    others = [port for port in meeting.derive_ports(_shared_identity(env), count) if port != chosen]
    return [chosen, *others][:count]


def world_identity(env: Mapping[str, str] | None = None) -> str:
    """A word that the ranks of this world share and others do not."""
    env = os.environ if env is None else env
    return f"{_shared_identity(env)}:{_port(env, MASTER_PORT)}"


def _decide(env: Mapping[str, str]) -> Claim:
    if env.get(claims.MARK) == "none":
        return _alone()
    layers = [claim for read in (claims.torch_style, claims.mpi, claims.slurm_step) if (claim := read(env))]
    if not layers:
        _refuse_batch_shell(env)
        return _alone()
    chosen = layers[0]
    for other in layers[1:]:
        if not _compatible(chosen, other):
            raise ContradictionError(_disagreement(chosen, other))
    return chosen


def _alone() -> Claim:
    return Claim("none", 0, 1, 0, 1, 0, 1, {})


def _compatible(chosen: Claim, other: Claim) -> bool:
    if other.size == 1:
        return True
    if (chosen.rank, chosen.size) == (other.rank, other.size):
        return True
    agents = chosen.source in ("torchrun", "deepspeed") and chosen.num_groups > 1
    return agents and (chosen.group_rank, chosen.num_groups) == (other.rank, other.size)


def _disagreement(chosen: Claim, other: Claim) -> str:
    return with_values(
        f"two launchers disagree about this process: {chosen.source} says rank {chosen.rank} of {chosen.size}, "
        f"{other.source} says rank {other.rank} of {other.size}. Start the ranks with one launcher: srun with one "
        "task per rank, or one torchrun per node (--nnodes = number of tasks); unset variables left over from "
        f"another run; or export {claims.MARK}=none to run alone",
        {**chosen.values, **other.values},
    )


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    """A job of several tasks, but this process was not started as one of them (no srun, no MPI)."""
    tasks = _count(env, "SLURM_NTASKS")
    if "SLURM_PROCID" in env and tasks > 1:
        raise ContradictionError(
            with_values(
                f"the job has {tasks} tasks but this process is none of them: there is no job step and no MPI "
                "launcher, so every copy would think it is rank 0 of 1. Start it with srun (prep: srun --mpi=pmix) "
                f"or mpirun, or export {claims.MARK}=none to run alone",
                claims.slurm_values(env),
            )
        )


def _master(claim: Claim, env: Mapping[str, str]) -> tuple[str, int]:
    from_launcher = claim.source in ("local", "torchrun", "deepspeed", "env")
    if from_launcher:
        if claim.size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise LaunchError(
                with_values(
                    "MASTER_ADDR and MASTER_PORT must be set beside RANK and WORLD_SIZE", claim.values
                )
            )
        return env.get("MASTER_ADDR", "127.0.0.1"), _port(env, "MASTER_PORT")
    return _address(claim, env), _port(env, MASTER_PORT)


def _address(claim: Claim, env: Mapping[str, str]) -> str:
    if address := env.get(MASTER_ADDRESS):
        return address
    if claim.num_groups == 1:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if nodes:
        return first(nodes)
    raise LaunchError(
        with_values(
            f"{claim.num_groups} nodes, but nothing says which is the first: export {MASTER_ADDRESS}",
            claim.values,
        )
    )


def _port(env: Mapping[str, str], name: str) -> int:
    """The port a launcher chose, else one derived from what the ranks share."""
    text = env.get(name)
    if text is None:
        return meeting.derive_ports(_shared_identity(env) or str(os.getpid()), 1)[0]
    if not (text.isdigit() and 0 < int(text) < 65_536):
        raise LaunchError(f"environment variable {name} is {text!r}, not a port number")
    return int(text)


def _shared_identity(env: Mapping[str, str]) -> str:
    """What the ranks of one world share: the step, or MPI's own job name; empty where nothing says."""
    if job := env.get("SLURM_JOB_ID"):
        return f"{job}.{env.get('SLURM_STEP_ID', '')}.{env.get('SLURM_RESTART_COUNT', '0')}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID", "HYDI_CONTROL_FD"):
        if name in env:
            return env[name]
    return ""


def _refuse_unreachable(address: str, resolve: Callable[[str], str | None], claim: Claim) -> None:
    found = resolve(address)
    if found is not None and not ipaddress.ip_address(found).is_loopback:
        return
    why = f"is {found}, a loopback address" if found else "has no address on this node"
    raise LaunchError(
        with_values(
            f"the master {address!r} {why}: {claim.num_groups} nodes cannot meet there. Fix the name in /etc/hosts "
            f"or DNS, or export {MASTER_ADDRESS} with the first node's address in the cluster's network",
            claim.values,
        )
    )


def _resolve(name: str) -> str | None:
    """The address of a name; None when it has none here."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0]).split("%")[
            0
        ]
    except OSError:
        return None


def refuse_unknown_interface(env: Mapping[str, str]) -> None:
    """Raises InterfaceError where ``GLOO_SOCKET_IFNAME`` names a network interface that this node does not have.

    Gloo itself would fail on it in the middle of joining, in words that name no variable.
    """
    present = {name for _, name in socket.if_nameindex()}
    wanted = [name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise InterfaceError(
            f"GLOO_SOCKET_IFNAME={env['GLOO_SOCKET_IFNAME']}: {socket.gethostname()} has no network interface "
            f"{', '.join(missing)}; it has {', '.join(sorted(present))}. Name one of these, or unset the variable"
        )


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else 0
