"""What the two ways of splitting the head cost on two tensor-parallel gloo ranks: collectives, bytes, seconds a step.

python benchmarks/head_parallelism.py        # a minute; lines ``name: value``

``position`` shards the positions and keeps the weights whole; ``tensor`` splits the weights of the head's blocks.
Everything outside of the head is the same in both, so the difference between the two is the head's. On a machine that
does other work too, compare ``cpu_seconds`` (of rank 0) rather than ``seconds``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _engines as engines
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2
REPEATS = 6


class CountCollectives(TorchDispatchMode):
    """Counts the collectives of this rank and the bytes it puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.__name__.split(".")[0].strip("_")] += 1
            given = args[1] if "_base_" in func.__name__ else args[0]  # (output, input, …) or (tensors, …)
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(given))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def measure(mode: str, rank: int) -> dict[str, float]:
    """One engine of the given mode: counts of one step, the least seconds of a few."""
    from calm_scale.config import RunConfig
    from calm_scale.training.engine import Batch
    from calm_scale.training.megatron.engine import MegatronEngine

    raw = engines.run_config().model_dump(mode="json")
    raw["lm"]["parallel"].update(tensor=RANKS, head_parallelism=mode, pipeline_layout="even")
    run = RunConfig.model_validate(raw)
    world = SimpleNamespace(rank=rank, world_size=RANKS, device=torch.device("cpu"))
    engine = MegatronEngine(run, world, engines._frozen_autoencoder(run))
    batch = Batch(1, engines.tokens()[None], torch.arange(engines.BATCH)[None])
    engine.train_step(batch, 1e-4)
    with CountCollectives() as counted:
        engine.train_step(batch, 1e-4)
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.train_step(batch, 1e-4)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {
        "collectives": sum(counted.calls.values()),
        "mib": counted.num_bytes / 2**20,
        "seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
    }


def run_rank(rank: int, rendezvous: str) -> None:
    """One rank: both modes after one another; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for mode in ("position", "tensor"):
        figures = measure(mode, rank)
        if rank == 0:
            for name, value in figures.items():
                print(f"head_{mode}_{name}: {value:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    rendezvous = Path(f"/tmp/calm_scale_head_parallelism_{os.getpid()}")
    command = [sys.executable, __file__, "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(rendezvous)], env=environment) for rank in range(RANKS)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        rendezvous.unlink(missing_ok=True)
    sys.exit(max(codes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), sys.argv[3])
    else:
        main()
