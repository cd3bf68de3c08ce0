"""One thread for torch in every test: several processes with several threads each on few cores crawl."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from calm_scale.runtime.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")

TOGETHER = (
    ("tests/slurm/test_jobs.py", "tests/slurm/test_real.py"),
    ("tests/stages/test_whole_run.py", "tests/stages/test_run_of_a_package.py"),
    ("tests/lm/test_layouts.py", "tests/lm/test_resume.py", "tests/lm/test_patch_model.py"),
)
"""Files that one worker of pytest-xdist takes: they share a fixture that takes a minute or two. The longest first."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a whole file, or the files of ``TOGETHER``, to one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((files[0] for files in TOGETHER if path in files), path)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist: the files of ``TOGETHER`` first, then those with several processes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    places = {path: place for place, files in enumerate(TOGETHER) for path in files}

    def place(item: pytest.Item) -> int:
        with_ranks = item.get_closest_marker("ranks") is not None
        return places.get(item.nodeid.partition("::")[0], len(places) + (not with_ranks))

    items.sort(key=place)


RankEnded = tuple[int, str, str]
"""Exit code, standard output and error output of one rank."""


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[RankEnded]]:
    """Runs a program as ranks of one world, as torchrun would start them, to their ends."""

    def run(
        program: Path, *arguments: str, num_ranks: int = 2, timeout: float = 300, **extra: str
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


class Shared:
    """Two ranks as threads: what they tell each other."""

    def __init__(self) -> None:
        self.values: list[Any] = [None, None]
        self.barrier = threading.Barrier(2, timeout=120)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadWorld(World):
    def gather_objects(self, value: Any) -> list[Any]:
        return self.control.exchange(self.rank, value)

    def maximum(self, values: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(*self.gather_objects(list(values)), strict=True)]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        rows = self.gather_objects(list(values))
        return rows if self.is_first else []

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.gather_objects(value)[source]


@pytest.fixture
def on_two_ranks() -> Callable[[Callable[[World], object]], list[BaseException | None]]:
    """Runs work on two ranks, threads of this process, and returns what each raised."""

    def run(work: Callable[[World], object]) -> list[BaseException | None]:
        import torch  # most tests go without

        shared = Shared()
        worlds = [ThreadWorld(rank, 2, rank, 2, torch.device("cpu"), "gloo", shared) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return [future.exception() for future in [pool.submit(work, world) for world in worlds]]

    return run
