"""How fast a checkpoint is saved and loaded, and how long training stands still for it.

One process, the language model's engine. In one run, alternating, the best of several rounds each:

- ``torch.save`` and ``torch.load`` of the same tensors (parameters and Adam moments) as one plain file. Its save is
  timed with the fsync that makes it durable, because ours ends on the disk too; without it: ``torch_save_cached_s``
- the whole of ours: write, list, fsync, checksums, manifest, rename; and: find, verify every checksum, load
- the seconds the training thread is held up by one save, synchronous and in the background

    python benchmarks/checkpoint.py [--megabytes 300] [--rounds 4]
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
from types import SimpleNamespace
from typing import Any

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.checkpoint.card import Card, Counters
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import RunConfig
from calm_scale.config.checkpoint import CheckpointConfig
from calm_scale.runtime.world import World
from calm_scale.training.engine import Batch

BYTES_PER_PARAMETER = 12  # fp32 weight and two moments


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=300, help="size of the state, about")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default the temporary folder"
    )
    options = parser.parse_args()
    torch.set_num_threads(2)
    run = run_config(options.megabytes)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
    engine = build(run, world)
    engine.train_step(batch(run, 1), 1e-4)
    with tempfile.TemporaryDirectory(prefix="calm-checkpoint-", dir=options.folder) as scratch:
        numbers = measure(engine, run, world, Path(scratch), options.rounds)
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")
    return 0


def measure(engine: Any, run: RunConfig, world: World, scratch: Path, rounds: int) -> dict[str, float]:
    plain = scratch / "plain.pt"
    state = plain_state(engine)
    store = CheckpointStore(scratch / "checkpoints", world, CheckpointConfig(keep_last=1))
    counter = iter(range(1, 1000))
    best: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        gc.collect()
        start = time.perf_counter()
        work()
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)

    def save_ours() -> None:
        step = next(counter)
        store.save(step, engine.save, card(step))

    def load_ours() -> None:
        fresh = CheckpointStore(store.root, world, store.config)
        found = fresh.newest()
        if found is None:
            raise RuntimeError("nothing to load")
        engine.load(found.shards)

    for _ in range(rounds):
        plain.unlink(missing_ok=True)
        timed("torch_save_cached_s", lambda: torch.save(state, plain))
        plain.unlink()
        timed("torch_save_s", lambda: save_durably(state, plain))
        timed("save_s", save_ours)
        store.close()
        timed("torch_load_s", lambda: load_plain(engine, plain))
        timed("load_s", load_ours)
    size = sum(value.numel() * value.element_size() for value in state.values())
    stalls = [stall(engine, run, store, next(counter)) for _ in range(rounds)]
    shutil.rmtree(store.root)
    alone = min(seconds for _, seconds, _ in stalls)
    return {
        "state_megabytes": size / 1e6,
        **best,
        "save_vs_torch": best["torch_save_s"] / best["save_s"],
        "save_vs_torch_cached": best["torch_save_cached_s"] / best["save_s"],
        "load_vs_torch": best["torch_load_s"] / best["load_s"],
        "async_stall_s": min(held for held, _, _ in stalls),
        "async_stall_vs_sync": min(held for held, _, _ in stalls) / best["save_s"],
        "step_s": alone,
        "step_while_saving_s": min(beside for *_, beside in stalls),
    }


def stall(engine: Any, run: RunConfig, store: CheckpointStore, step: int) -> tuple[float, float, float]:
    """Seconds that one background save holds up training; a step's seconds without and beside it."""
    store.close()
    alone = seconds_of(lambda: engine.train_step(batch(run, step), 1e-4))
    held = seconds_of(lambda: store.begin(step, engine.save_async, card(step)))
    beside = [seconds_of(lambda: engine.train_step(batch(run, step), 1e-4))]
    while store.saving is not None:
        if not store.waiting:
            held += seconds_of(store.advance)
        else:
            beside.append(seconds_of(lambda: engine.train_step(batch(run, step), 1e-4)))
    return held, alone, sum(beside) / len(beside)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save_durably(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_plain(engine: Any, path: Path) -> None:
    """``torch.load`` and the copy into the live tensors: what a plain training script does."""
    loaded = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, value in plain_state(engine).items():
            value.copy_(loaded[name])


def plain_state(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters and Adam moments, the live tensors themselves."""
    state: dict[str, torch.Tensor] = {}
    inner = engine.optimizer.inner
    optimizers = getattr(inner, "chained_optimizers", [inner])
    moments: dict[Any, Any] = {}
    for optimizer in optimizers:
        moments |= dict(optimizer.optimizer.state)
    for index, model in enumerate(engine.models):
        for name, parameter in model.named_parameters():
            state[f"{index}.{name}"] = parameter.detach()
    for number, entry in enumerate(moments.values()):
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key}.{number}"] = entry[key]
    return state


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


def run_config(megabytes: int) -> RunConfig:
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
                "training": {"steps": 100, "global_batch": 1, "precision": "fp32"},
            },
        }
    )


def build(run: RunConfig, world: World) -> Any:
    from calm_scale.training.megatron_engine import MegatronEngine

    if run.autoencoder is None:
        raise RuntimeError("the benchmark's document has an autoencoder")
    codec = Autoencoder(run.autoencoder.model, run.vocab_size, run.patch_size).eval().requires_grad_(False)
    place = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=world.device)
    return MegatronEngine(run, place, codec)


def batch(run: RunConfig, step: int) -> Batch:
    tokens = torch.randint(run.vocab_size, (1, 1, 256), generator=torch.Generator().manual_seed(step))
    return Batch(step, tokens, torch.tensor([[step]]))


if __name__ == "__main__":
    sys.exit(main())
