"""Gloo ranks for this room's tests: one set of processes makes many measurements, tests read its JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")
REPO = PROGRAM.parents[2]
Results = list[dict[str, Any]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """``run_ranks(n, "suite", folder)``: what every one of n ranks reports, in rank order."""

    def run(num_ranks: int, suite: str, folder: Path) -> Results:
        out = tmp_path_factory.mktemp(f"{suite}_{num_ranks}")
        base = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(REPO), MASTER_ADDR="127.0.0.1")
        base |= {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_ranks)}
        base["LOCAL_WORLD_SIZE"] = str(num_ranks)
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), suite, str(folder), str(out / f"{rank}.json")],
                env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        logs = []
        try:
            logs = [process.communicate(timeout=280)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
        assert not failed, f"ranks {failed} of {suite} failed:\n" + "\n".join(logs[rank] for rank in failed)
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]

    return run
