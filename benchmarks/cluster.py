"""What a rank asks of the others and of the file system, on many ranks over few, without a GPU.

    python benchmarks/cluster.py [--ranks 1024] [--json FILE]

The product's code runs on simulated ranks: threads with a store and collectives of their own, which count. File
system calls are counted where Python makes them (``os.stat``, ``os.scandir``, ``os.listdir``, every open). The first
rank looks at everything once for all and is shown apart; a figure is the median of the other ranks.

- join_calls_growth: store calls of the roll call. opens_growth: opens and stats at the opening of a prepared split.
- save_stats_growth: stats, listings and opens of a save with rotation over two kept checkpoints, a file a rank.
- step_control_bytes_growth: bytes of one ``World.poll`` that do not go through the GPUs' own tree, plus those that do.
- fds_per_rank_1024: file descriptors that joining and the control group add. Real gloo processes (4, 8, 16) do what
  the control group does, connecting to whom they speak as beside NCCL; beyond, the largest count grows with each
  doubling as it did last. The first rank also holds the store's connections, one a rank, for which its limit is raised.
- save_copy_over_owned: bytes that a rank copies for a save in the background, over bytes of the files it writes. Real
  Megatron engine, data parallel over four gloo ranks.
"""

from __future__ import annotations

import argparse
import builtins
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GOALS = {
    "join_calls_growth": 1.1,
    "opens_growth": 1.1,
    "save_stats_growth": 1.1,
    "step_control_bytes_growth": 1.1,
    "fds_per_rank_1024": 64,
    "save_copy_over_owned": 1.1,
}
FEW = 8
REAL_RANKS = (4, 8, 16)


def main() -> int:
    """Prints the figures; 1 where one is over its goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("connections", "copies"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "connections":
        return count_connections()
    if options.role == "copies":
        return count_copies(options.folder)
    figures = measure(options.ranks)
    show(figures, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(figures[name] > goal for name, goal in GOALS.items()))


def measure(many: int) -> dict[str, float]:
    """All figures by name, and the counts behind them."""
    out: dict[str, float] = {}
    counts = {size: simulated(size) for size in (FEW, many)}
    for name, key in (("join", "join_calls"), ("opens", "opens"), ("save", "save_stats")):
        few, more = counts[FEW][key], counts[many][key]
        figure = {"join": "join_calls_growth", "opens": "opens_growth", "save": "save_stats_growth"}[name]
        out[figure] = more / few
        out |= {
            f"{key}_{FEW}": few,
            f"{key}_{many}": more,
            f"{key}_first_{many}": counts[many][f"{key}_first"],
        }
    out["step_control_bytes_growth"] = poll_bytes(many) / poll_bytes(FEW)
    real = {size: real_ranks("connections", size) for size in REAL_RANKS}
    most = [max(found[1:]) for found in real.values()]
    out |= {f"fds_per_rank_{size}": found for size, found in zip(REAL_RANKS, most, strict=True)}
    out |= {f"fds_first_{size}": found[0] for size, found in real.items()}
    out["fds_per_rank_1024"] = most[-1] + (most[-1] - most[-2]) * math.log2(1024 / REAL_RANKS[-1])
    out["save_copy_over_owned"] = max(real_ranks("copies", 4))
    return out


def show(figures: dict[str, float], many: int) -> None:
    """A table for people, ``name: value`` lines for programs."""
    table = Table("figure", "value", "goal", title=f"a rank of {many} over a rank of {FEW}")
    for name, goal in GOALS.items():
        table.add_row(name, f"{figures[name]:.3f}", f"≤ {goal:g}")
    Console().print(table)
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")


# Simulated ranks


class Meeting:
    """What the threads of one simulated job exchange."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=600)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class CountingStore:
    """The calls of torch's store that a roll call makes, over a dictionary."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def _count(self) -> None:
        self.calls[threading.current_thread().name] += 1

    def set(self, key: str, value: str) -> None:
        """Counts and sets."""
        self._count()
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        """Counts and adds."""
        self._count()
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def get(self, key: str) -> bytes:
        """Counts, and waits for the key."""
        self._count()
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout=600)
            return self.values[key]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Counts, and sets where the key is not there."""
        self._count()
        with self.changed:
            found = self.values.setdefault(key, value.encode())
            self.changed.notify_all()
            return found


def simulated(size: int) -> dict[str, float]:
    """Calls of a rank among ``size``: median of the others, and the first's."""
    import torch

    from calm_scale.checkpoint.store import CheckpointStore
    from calm_scale.config.training import CheckpointConfig
    from calm_scale.runtime.world import World, _roll_call
    from calm_scale.stages.splits import open_together
    from data_prep.shards.reading import ShardDataset

    class Simulated(World):
        def gather_objects(self, value: Any) -> list[Any]:
            return self.control.exchange(self.rank, value)

        def maximum(self, values: Sequence[int]) -> list[int]:
            return [max(column) for column in zip(*self.gather_objects(list(values)), strict=True)]

        def broadcast_object(self, value: Any, source: int = 0) -> Any:
            return self.gather_objects(value)[source]

    meeting, store = Meeting(size), CountingStore()
    worlds = [Simulated(rank, size, 0, 1, torch.device("cpu"), "gloo", meeting) for rank in range(size)]

    def on_all(work: Callable[[World], object]) -> None:
        def named(world: World) -> object:
            threading.current_thread().name = f"rank {world.rank}"
            return work(world)

        with ThreadPoolExecutor(size) as pool:
            for done in [pool.submit(named, world) for world in worlds]:
                done.result()

    def per_rank(calls: Counter[str]) -> tuple[float, float]:
        return statistics.median(calls[f"rank {rank}"] for rank in range(1, size)), calls["rank 0"]

    found: dict[str, float] = {}
    on_all(lambda world: _roll_call(store, world.rank, size, timedelta(seconds=600)))
    found["join_calls"], found["join_calls_first"] = per_rank(store.calls)
    with tempfile.TemporaryDirectory(prefix="calm-cluster-") as scratch:
        split = prepared_split(Path(scratch) / "prep")
        with counted_file_calls() as calls:
            on_all(lambda world: open_together(world, split, lambda: ShardDataset(split, 64, partial=True)))
        found["opens"], found["opens_first"] = per_rank(calls)
        root = Path(scratch) / "checkpoints"
        stores = [CheckpointStore(root, world, CheckpointConfig(keep_last=2), "run") for world in worlds]

        def save(world: World, step: int) -> None:
            stores[world.rank].save(step, lambda shards: write_file(shards, world.rank), card_of(step))
            stores[world.rank].rotate()

        for step in (1, 2):
            on_all(lambda world, step=step: save(world, step))
        with counted_file_calls() as calls:
            on_all(lambda world: save(world, 3))
        found["save_stats"], found["save_stats_first"] = per_rank(calls)
    return found


def write_file(shards: Path, rank: int) -> list[str]:
    """A rank's only file."""
    (shards / f"rank_{rank}").write_bytes(b"x" * 64)
    return [f"rank_{rank}"]


def card_of(step: int) -> Any:
    """A card of the run ``run``."""
    from calm_scale.checkpoint.card import Card, Counters

    names = {"stage": "lm", "run_id": "run", "config_hash": "", "tokenizer_fingerprint": ""}
    more: dict[str, Any] = {"shards_fingerprint": "", "patch_size": 4, "vocab_size": 64, "config": {}}
    return Card(**names, **more, created=time.time(), counters=Counters(steps=step))


def prepared_split(folder: Path) -> Path:
    """A prepared split of some fifty shards."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from calm_scale.config import RunConfig
    from data_prep.prep import prepare

    folder.mkdir()
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    line = json.dumps({"text": "a b " * 200_000}) + "\n"
    (folder / "text.jsonl").write_text(line * 8)
    run = RunConfig.model_validate(
        {
            "name": "cluster",
            "workdir": str(folder / "run"),
            "vocab_size": 4,
            "patch_size": 4,
            "tokenizer": {"path": str(folder / "tokenizer.json"), "add_bos": False},
            "prep": {
                "sources": [{"paths": [str(folder / "text.jsonl")]}],
                "sequence_length": 64,
                "alignment": 4,
                "shard_megabytes": 1,
                "workers": 1,
            },
        }
    )
    prepare(run)
    return run.data_dir / "train"


@contextmanager
def counted_file_calls() -> Any:
    """Stats, listings and opens, by the name of the thread that makes them."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(os, name) for name in ("stat", "scandir", "listdir", "open")}
    opened = builtins.open

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[threading.current_thread().name] += 1
            return function(*arguments, **options)

        return call

    import io

    io_open = io.open
    try:
        for name, function in originals.items():
            setattr(os, name, counted(function))
        builtins.open = io.open = counted(opened)  # type: ignore[assignment]
        yield calls
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
        builtins.open, io.open = opened, io_open


def poll_bytes(size: int) -> float:
    """Bytes of one poll of a rank among ``size`` with GPUs: what it hands to each group, times the messages it sends.

    gloo reduces around a ring: 2(N − 1) messages of a part each. NCCL reduces small tensors up and down a binary tree:
    at most four messages, however many ranks there are.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from calm_scale.runtime.world import World

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    control = dist.new_group(backend="fake")
    sent: Counter[bool] = Counter()
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
        sent[group is control] += tensor.nbytes
        return reduce(tensor, *arguments, group=group, **options)

    dist.all_reduce = counted
    try:
        World(0, size, 0, 8, torch.device("cpu"), "nccl", control).poll([0, 0])
    finally:
        dist.all_reduce = reduce
        dist.destroy_process_group()
    return 2 * (size - 1) * sent[True] + 4 * sent[False]


# Real ranks


def real_ranks(role: str, size: int) -> list[float]:
    """What each of ``size`` gloo processes prints in the role."""
    with tempfile.TemporaryDirectory(prefix="calm-cluster-") as scratch:
        command = [sys.executable, "-W", "ignore", __file__, "--role", role, "--folder", scratch]
        base = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        base |= {"MASTER_PORT": str(20_000 + os.getpid() % 9_000 + size), "TORCH_GLOO_LAZY_INIT": "1"}
        ranks = [
            subprocess.Popen(
                command,
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{role}: a rank failed\n" + "\n".join(said))
    return [float(text.split()[-1]) for text in said]


def count_connections() -> int:
    """File descriptors that the control group's collectives add to this process."""
    from calm_scale.runtime.world import init_world

    before = len(list(Path("/proc/self/fd").iterdir()))
    world = init_world(device="cpu")
    for _ in range(3):
        world.maximum([0, 1])
        world.gather_objects({"rank": world.rank})
        world.broadcast_object("x")
    found = len(list(Path("/proc/self/fd").iterdir())) - before
    world.barrier()
    print(found, flush=True)
    world.close()
    return 0


def count_copies(folder: Path) -> int:
    """Bytes copied for a background save over bytes of the files written, on this rank."""
    from _engines import run_config

    from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
    from calm_scale.runtime.world import init_world
    from calm_scale.training.megatron.engine import MegatronEngine

    world = init_world(device="cpu")
    document = run_config().model_dump()
    document["lm"]["parallel"]["data"] = world.world_size
    document["lm"]["training"] |= {"global_batch": 2 * world.world_size}
    run = type(run_config()).model_validate(document)
    autoencoder = run.require_autoencoder()
    codec = FrozenAutoencoder(Autoencoder(autoencoder.model, run.vocab_size, run.patch_size))
    engine = MegatronEngine(run, world, codec)
    names = engine.save_async(folder).result()
    written = sum((folder / name).stat().st_size for name in names if name.startswith("__"))
    print(engine._staging.copied_bytes / written, flush=True)
    world.barrier()
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
