"""One thread for torch in every test: several processes with several threads each on few cores crawl."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

RankEnded = tuple[int, str, str]
"""Exit code, standard output and error output of one rank."""


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[RankEnded]]:
    """Runs a program as ranks of one world, as torchrun would start them, to their ends."""

    def run(
        program: Path, *arguments: str, num_ranks: int = 2, timeout: float = 90, **extra: str
    ) -> list[RankEnded]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks), **extra}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            said = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]

    return run
