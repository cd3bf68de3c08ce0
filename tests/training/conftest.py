"""Tiny runs: in this process, or as gloo ranks that can be signalled and killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from calm_scale.runtime.world import World


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HERE = Path(__file__).parent


@pytest.fixture
def solo() -> World:
    return World(0, 1, 0, 1, torch.device("cpu"), "gloo")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    sys.path.insert(0, str(HERE))
    try:
        return importlib.import_module("train_tiny")
    finally:
        sys.path.remove(str(HERE))


@dataclass
class Ranks:
    """Started ranks of one job, in a process group of their own."""

    processes: list[subprocess.Popen[str]]
    logs: list[Path]

    def wait(self, timeout: float = 120) -> list[int]:
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.send(signal.SIGABRT)  # faulthandler prints where each thread hangs
            time.sleep(1)
            pytest.fail(f"still running after {timeout} s\n{self.text()}")

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def until(self, condition: Callable[[], Any], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain\n{self.text()}"
            assert any(process.poll() is None for process in self.processes), f"ended early\n{self.text()}"
            time.sleep(0.005)

    def send(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()


@dataclass
class Launcher:
    """Starts tiny ranks; ends what a test left running."""

    folder: Path
    started: list[Ranks] = field(default_factory=list)

    def __call__(self, run: Path, ranks: int = 2, **options: Any) -> Ranks:
        port = str(free_port())
        processes, logs = [], []
        for rank in range(ranks):
            env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI"))}
            env |= {
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            env |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
            log = self.folder / f"log-{len(self.started)}-{rank}.txt"
            program = [sys.executable, str(HERE / "train_tiny.py"), str(run), json.dumps(options)]
            with log.open("w") as sink:
                processes.append(subprocess.Popen(program, env=env, stdout=sink, stderr=sink, text=True))
            logs.append(log)
        self.started.append(Ranks(processes, logs))
        return self.started[-1]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for ranks in launcher.started:
        ranks.kill()
