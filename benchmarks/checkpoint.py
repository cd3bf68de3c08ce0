"""How fast a checkpoint is saved and loaded, and how long training stands still for it.

The language model's engine on two gloo ranks (TP 2), as it is used: every rank writes and reads its own shards. In one
run, alternating, several rounds each (seconds: the best; ratios: the median of the rounds):

- ``torch.save`` and ``torch.load`` of the same bytes (parameters and Adam moments of all ranks) as one plain file by
  one process. Its save is timed with the fsync that makes it durable, because ours ends on the disk too; without it:
  ``torch_save_cached_s``
- the whole of ours: write, list, fsync, checksums, manifest, rename; and: find, verify every checksum, load
- the seconds the training thread is held up by one save, synchronous and in the background

    python benchmarks/checkpoint.py [--megabytes 600] [--rounds 10] [--ranks 2]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import ratio_text, ratios

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.checkpoint.card import Card, Counters
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import RunConfig
from calm_scale.config.training import CheckpointConfig
from calm_scale.runtime.world import World, init_world
from calm_scale.training.engine import Batch
from launchers.local import launch

BYTES_PER_PARAMETER = 12  # fp32 weight and two moments


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=600, help="size of the whole state, about")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default the temporary folder"
    )
    options = parser.parse_args()
    if options.ranks > 1 and "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="calm-checkpoint-", dir=options.folder) as scratch:
            folder = ["--folder", scratch]
            return launch([sys.executable, "-W", "ignore", *sys.argv, *folder], options.ranks)
    world = init_world(device="cpu")
    run = run_config(options.megabytes, world.world_size)
    engine = build(run, world)
    engine.train_step(batch(run, 1), 1e-4)
    scratch = world.broadcast_object(tempfile.mkdtemp(prefix="calm-checkpoint-", dir=options.folder))
    figures = measure(engine, run, world, Path(scratch), options.rounds)
    if world.is_first:
        shutil.rmtree(scratch)
        print("\n".join(figures), flush=True)
    world.barrier()
    world.close()
    return 0


def measure(engine: Any, run: RunConfig, world: World, scratch: Path, rounds: int) -> list[str]:
    plain = scratch / "plain.pt"
    state = whole_state(engine, world)
    store = CheckpointStore(scratch / "checkpoints", world, CheckpointConfig(keep_last=1))
    counter = iter(range(1, 1000))
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object], *, first_only: bool = False) -> None:
        gc.collect()
        world.barrier()
        start = time.perf_counter()
        if world.is_first or not first_only:
            work()
        if not first_only:
            world.barrier()
        spent.setdefault(name, []).append(time.perf_counter() - start)
        world.barrier()

    def save_ours() -> None:
        step = next(counter)
        store.save(step, engine.save, card(step))
        store.rotate()

    def load_ours() -> None:
        fresh = CheckpointStore(store.root, world, store.config)
        found = fresh.newest()
        if found is None:
            raise RuntimeError("nothing to load")
        engine.load(found.shards)

    for _ in range(rounds):
        timed("torch_save_cached_s", lambda: save_plain(state, plain, durable=False), first_only=True)
        timed("torch_save_s", lambda: save_plain(state, plain, durable=True), first_only=True)
        timed("save_s", save_ours)
        store.close()
        timed("torch_load_s", lambda: load_plain(state, plain), first_only=True)
        timed("load_s", load_ours)
    size = sum(value.numel() * value.element_size() for value in state.values())
    state.clear()
    stalls = [stall(engine, run, store, world, next(counter)) for _ in range(rounds)]
    store.close()
    held = [stalled for stalled, _, _ in stalls]
    seconds = {
        "ranks": float(world.world_size),
        "state_megabytes": size / 1e6,
        **{name: min(of_rounds) for name, of_rounds in spent.items()},
        "async_stall_s": min(held),
        "step_s": min(alone for _, alone, _ in stalls),
        "step_while_saving_s": min(beside for *_, beside in stalls),
    }
    return [f"{name}: {value:.4g}" for name, value in seconds.items()] + [
        ratio_text("save_vs_torch", ratios(spent["torch_save_s"], spent["save_s"])),
        ratio_text("save_vs_torch_cached", ratios(spent["torch_save_cached_s"], spent["save_s"])),
        ratio_text("load_vs_torch", ratios(spent["torch_load_s"], spent["load_s"])),
        ratio_text("async_stall_vs_sync", ratios(held, spent["save_s"])),
    ]


def stall(
    engine: Any, run: RunConfig, store: CheckpointStore, world: World, step: int
) -> tuple[float, float, float]:
    """Seconds that one background save holds up training; a step's seconds without and beside it."""
    store.rotate()
    store.close()
    alone = seconds_of(lambda: engine.train_step(batch(run, step), 1e-4))
    held = seconds_of(lambda: store.begin(step, engine.save_async, card(step)))
    beside = [seconds_of(lambda: engine.train_step(batch(run, step), 1e-4))]
    while store.saving is not None:
        if world.agree(not store.waiting):
            held += seconds_of(store.advance)
        else:
            beside.append(seconds_of(lambda: engine.train_step(batch(run, step), 1e-4)))
    return held, alone, sum(beside) / len(beside)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save_plain(state: dict[str, torch.Tensor], path: Path, durable: bool) -> None:
    """One new file, as a plain training script writes it."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        torch.save(state, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def load_plain(state: dict[str, torch.Tensor], path: Path) -> None:
    """``torch.load`` and the copy into existing tensors: what a plain training script does."""
    loaded = torch.load(path, weights_only=True)
    for name, value in state.items():
        value.copy_(loaded[name])


def whole_state(engine: Any, world: World) -> dict[str, torch.Tensor]:
    """Tensors of the sizes of all ranks' parameters and Adam moments, on the first rank."""
    moments = (
        entry for o in engine.optimizer.inner.chained_optimizers for entry in o.optimizer.state.values()
    )
    mine = [parameter for model in engine.models for parameter in model.parameters()]
    mine += [entry[key] for entry in moments for key in ("exp_avg", "exp_avg_sq")]
    shapes = world.gather_objects([tuple(tensor.shape) for tensor in mine])
    if not world.is_first:
        return {}
    named = [
        (f"rank{rank}.{i}", shape) for rank, of_rank in enumerate(shapes) for i, shape in enumerate(of_rank)
    ]
    return {name: torch.randn(shape) for name, shape in named}


def card(step: int) -> Card:
    return Card(
        stage="lm",
        run_id="bench",
        config={},
        config_hash="",
        patch_size=2,
        vocab_size=2048,
        tokenizer_fingerprint="",
        shards_fingerprint="",
        created=time.time(),
        counters=Counters(steps=step),
    )


def run_config(megabytes: int, ranks: int) -> RunConfig:
    """A backbone of about the wanted size (12 · layers · d² parameters and the rest)."""
    width = 512
    layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / (12 * width * width)) - 2)
    return RunConfig.model_validate(
        {
            "name": "bench",
            "vocab_size": 2048,
            "patch_size": 2,
            "autoencoder": {"model": {"latent_size": 16}, "training": {"steps": 1, "global_batch": 1}},
            "lm": {
                "backbone": {
                    "num_layers": layers,
                    "hidden_size": width,
                    "ffn_size": 4 * width * 2 // 3 // 8 * 8,
                    "num_heads": 8,
                    "positions": 128,
                },
                "head": {"kind": "energy", "num_blocks": 1, "num_samples": 4, "num_posterior": 8},
                "parallel": {"tensor": ranks},
                "training": {"steps": 100, "global_batch": 1, "precision": "fp32"},
            },
        }
    )


def build(run: RunConfig, world: World) -> Any:
    from calm_scale.training.megatron.engine import MegatronEngine

    if run.autoencoder is None:
        raise RuntimeError("the benchmark's document has an autoencoder")
    codec = Autoencoder(run.autoencoder.model, run.vocab_size, run.patch_size).eval().requires_grad_(False)
    return MegatronEngine(run, world, codec)


def batch(run: RunConfig, step: int) -> Batch:
    tokens = torch.randint(run.vocab_size, (1, 1, 256), generator=torch.Generator().manual_seed(step))
    return Batch(step, tokens, torch.tensor([[step]]))


if __name__ == "__main__":
    sys.exit(main())
