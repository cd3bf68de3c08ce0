"""The processes of a job: who they are, and the few words they exchange outside of the model.

Control traffic (verdicts, signals, file lists) has its own gloo group, so it never mixes with the engines'
collectives and needs no GPU.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from calm_scale.config.errors import CalmScaleError
from calm_scale.runtime.torch_settings import threads_per_rank
from launchers import environment, meeting
from launchers.environment import RankFacts
from launchers.ranks import Ranks

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
COLLECTIVE_SECONDS = 3600.0
"""Limit of one collective of any group, whoever makes the group; a last resort above the watchdog's."""
JOIN_SECONDS = 60.0
"""A rank that has not shown up by then is named; a wrong world size must not wait for ever."""


_PORT_IS_OURS = ("slurm", "mpi")
"""Launchers that give the ranks no meeting point."""
_BIND_GPUS = ("slurm", "mpi")
"""Launchers that can show every rank a GPU of its own as the only one."""
_OTHER_FILES = 512
"""Open files of a rank besides the connections to the other ranks: shards, libraries, logs, NCCL."""
_RANK_0_LISTENS = (*_PORT_IS_OURS, "env", "deepspeed")
"""Launchers that leave the meeting to the ranks; the others (torchrun, our local one) see to it themselves."""


class WorldError(CalmScaleError):
    """The processes that came together are not the job that was described."""

    may_pass = True


@dataclass(frozen=True)
class World(Ranks):
    """All ranks of this job. A world of one needs no launcher and no process group."""

    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    control: Any = None

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.maximum([0])

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks, one small all-reduce."""
        if self.world_size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return [int(value) for value in tensor.tolist()]

    def poll(self, values: Sequence[int]) -> list[int]:
        """``maximum`` for every step: on the GPUs' own group where there is one.

        gloo's ring takes 2(N − 1) messages one after the other, NCCL's tree log₂ N. Not beside other collectives of
        that group.
        """
        if self.world_size == 1 or self.backend != "nccl":
            return self.maximum(values)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def agree(self, ok: bool) -> bool:
        """True only if every rank says so."""
        return self.maximum([0 if ok else 1]) == [0]

    def gather_objects(self, value: Any) -> list[Any]:
        """``[world_size]`` values in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values`` in rank order on the first rank, nothing elsewhere: one small message a rank."""
        if self.world_size == 1:
            return [list(values)]
        import torch
        import torch.distributed as dist

        mine = torch.tensor(list(values), dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(mine, gathered, dst=0, group=self.control)
        return [row.tolist() for row in gathered or ()]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank ``source``'s value on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self.control)
        return box[0]

    def close(self) -> None:
        """Takes the process groups down; safe to call in a world of one."""
        if self.world_size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def init_world(
    device: Device = "auto",
    timeout_seconds: float = COLLECTIVE_SECONDS,
    facts: RankFacts | None = None,
    join_seconds: float | None = None,
) -> World:
    """Joins the job's processes, sets this rank's device and its CPU threads.

    Args:
        device: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a GPU. NCCL on CUDA, gloo on CPU.
        timeout_seconds: limit of one collective.
        join_seconds: how long the ranks wait for each other, from the first one's arrival; default ``JOIN_SECONDS``.
        facts: who this process is; default what the launcher's environment says. Without a launcher: a world of one.

    Raises:
        WorldError: no GPU for this rank though some were asked for, or ranks missing after ``join_seconds`` (they are
            named).
        LaunchError: the environment contradicts itself.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # before torch looks: Megatron takes a GPU wherever it sees one
        )
    import torch

    facts = facts or environment.facts()
    where = torch.device("cpu") if device == "cpu" else choose_device(device, facts)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    torch.set_num_threads(threads_per_rank(facts.local_world_size))
    backend = "nccl" if where.type == "cuda" else "gloo"
    if facts.world_size > 1 or backend == "gloo":  # Megatron and DeepSpeed make a group of one rank too
        environment.refuse_unknown_interface(os.environ)
    if facts.world_size == 1:
        return World(0, 1, facts.local_rank, 1, where, backend)
    _raise_file_limit(facts.world_size)
    if backend == "nccl":  # gloo then only carries control and saves, which need connections to few ranks
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    control = _join(
        facts,
        backend,
        timedelta(seconds=timeout_seconds),
        timedelta(seconds=JOIN_SECONDS if join_seconds is None else join_seconds),
    )
    return World(
        facts.rank, facts.world_size, facts.local_rank, facts.local_world_size, where, backend, control
    )


def choose_device(wanted: Device, facts: RankFacts) -> torch.device:
    """This rank's GPU, or the CPU where there is none and none was asked for."""
    import torch

    if not torch.cuda.is_available():
        asked = environment.gpus_of_node()
        if wanted == "auto" and not asked:
            return torch.device("cpu")
        raise WorldError(
            f"{'device is cuda' if wanted == 'cuda' else f'the job asked for {asked} GPUs a node'}, but torch "
            f"{torch.__version__} (built for CUDA {torch.version.cuda or '-: a CPU build'}) can use none on "
            f"{socket.gethostname()}. Driver: {nvidia_driver()}. CUDA_VISIBLE_DEVICES: "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}. Install a torch build that this driver supports, or "
            "set device=cpu to train on the CPU"
        )
    count = torch.cuda.device_count()
    if count == 1 and facts.launcher in _BIND_GPUS:
        return torch.device("cuda", 0)
    if facts.local_rank >= count:
        raise WorldError(
            f"local rank {facts.local_rank} has no GPU: this node shows {count}. Start at most {count} ranks a node, "
            "or set device=cpu"
        )
    return torch.device("cuda", facts.local_rank)


def _raise_file_limit(world_size: int) -> None:
    """Two gloo groups of all ranks, control and background saves, need a file descriptor per rank and group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * world_size + _OTHER_FILES
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WorldError(
            f"{world_size} ranks need {needed} open files each, and this process may open {hard} (`ulimit -Hn`) on "
            f"{socket.gethostname()}. Raise the limit for jobs, or start fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def nvidia_driver() -> str:
    """The NVIDIA driver of this machine, from the kernel."""
    try:
        first_line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none is loaded"
    return first_line.removeprefix("NVRM version:").strip()


def _join(facts: RankFacts, backend: str, timeout: timedelta, join: timedelta) -> Any:
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():
        if dist.get_world_size() != facts.world_size:
            raise WorldError(
                f"a process group of {dist.get_world_size()} exists, the launcher says {facts.world_size} ranks"
            )
    else:
        if facts.launcher in _RANK_0_LISTENS:
            store, rank, world_size = _meet(facts, join), facts.rank, facts.world_size
        else:
            _tell_libraries(facts)
            found = rendezvous("env://", rank=facts.rank, world_size=facts.world_size, timeout=join)
            try:
                store, rank, world_size = next(iter(found))
            except (RuntimeError, OSError) as error:  # the local launcher looks for EADDRINUSE in the text
                raise WorldError(
                    f"rank {facts.rank} of {facts.world_size} could not meet the others on port {facts.master_port} "
                    f"of {facts.master_addr}: {str(error).splitlines()[0]}. Did every rank start, and is the port free?"
                ) from None
        store.set_timeout(join)
        _roll_call(store, rank, world_size, join)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return dist.new_group(backend="gloo", timeout=timeout)


def _meet(facts: RankFacts, join: timedelta) -> Any:
    """A store on the first candidate port that rank 0 can take; every rank finds it there within ``join``.

    Where the ranks were given a port, it is the only candidate.
    """
    import torch.distributed as dist

    if facts.launcher in _PORT_IS_OURS:
        candidates, identity = environment.port_candidates(), environment.world_identity()
    else:
        candidates, identity = [facts.master_port], f"{facts.master_port} of {facts.world_size}"
    descriptor = None
    if facts.rank == 0:
        listener = meeting.take_port(candidates)
        port = int(listener.getsockname()[1])
        if port != candidates[0]:
            sys.stderr.write(f"port {candidates[0]} is taken on this node: meeting on {port}\n")
        meeting.welcome(listener, identity, facts.world_size, join.total_seconds())
        descriptor = listener.detach()  # from here on the store's
    else:
        port = meeting.find_port(facts.master_addr, candidates, identity, facts.rank, join.total_seconds())
    _tell_libraries(replace(facts, master_port=port))
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            facts.master_addr,
            port,
            facts.world_size,
            is_master=facts.rank == 0,
            timeout=join,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        raise WorldError(
            f"rank {facts.rank} found rank 0 on port {port} of {facts.master_addr}, but it left before the ranks were "
            f"together; its log says why ({error})"
        ) from None


def _tell_libraries(facts: RankFacts) -> None:
    """What torch, Megatron-core and DeepSpeed look up by themselves; a scheduler's own names mean nothing to them."""
    for name, value in (
        ("RANK", facts.rank),
        ("WORLD_SIZE", facts.world_size),
        ("LOCAL_RANK", facts.local_rank),
        ("LOCAL_WORLD_SIZE", facts.local_world_size),
        ("MASTER_ADDR", facts.master_addr),
        ("MASTER_PORT", facts.master_port),
    ):
        os.environ.setdefault(name, str(value))


def _roll_call(store: Any, rank: int, world_size: int, join: timedelta) -> None:
    """Every rank signs in and waits for the last one: three calls a rank, however many there are.

    ``join`` is the store's time limit. The rank that came first reaches it first, and its verdict is every rank's.

    Raises:
        WorldError: ranks are missing after ``join``; names them.
    """
    prefix = f"calm_scale/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{prefix}/rank{rank}", "here")
    verdict = f"{prefix}/verdict"
    if store.add(f"{prefix}/joined", 1) == world_size:
        told = store.compare_set(verdict, "", "here")
    else:
        try:
            told = store.get(verdict)
        except RuntimeError:
            missing = [other for other in range(world_size) if not store.check([f"{prefix}/rank{other}"])]
            shown = ", ".join(str(other) for other in missing[:16])
            told = store.compare_set(
                verdict,
                "",
                f"{len(missing)} of {world_size} ranks have not joined after {join.total_seconds():.0f} s: {shown}. "
                "Is the world size right, and did every node start?",
            )
    if told != b"here":
        raise WorldError(told.decode())
