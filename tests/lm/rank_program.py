"""Runs cases on one rank of several gloo worlds, one after the other: ``rank_program.py WORLDS.json OUT RANK``.

A world is a number of ranks, the first of all, and its cases; a case is a run configuration and a list of actions.
One process runs many cases: starting it costs more than running them. What an action reports is written by rank 0
to OUT/<case>.json.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from calm_scale.config import CalmScaleError, RunConfig
from calm_scale.training.engine import Batch
from calm_scale.training.megatron.engine import MegatronEngine

LATENT = 8


class FixedCodec:
    """A frozen 'autoencoder' that needs no training: sums of fixed random vectors."""

    def __init__(self, vocab_size: int) -> None:
        self.table = torch.randn(vocab_size, LATENT, generator=torch.Generator().manual_seed(0))

    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.table[tokens].sum(-2)
        return mean, torch.full_like(mean, -1.0)


def batch_of(engine: MegatronEngine, run: RunConfig, step: int) -> Batch:
    """Step ``step`` of a fixed random stream, this data-parallel rank's share."""
    training = run.lm.training
    places = torch.arange((step - 1) * training.global_batch, step * training.global_batch)
    length = run.lm.backbone.positions * run.patch_size
    rows = [
        torch.randint(run.vocab_size, (length,), generator=torch.Generator().manual_seed(int(i)))
        for i in places
    ]
    if engine._pad_id is not None:
        for i, row in zip(places.tolist(), rows, strict=True):  # 0 to 3 patches of padding at the end
            row[length - (i % 4) * run.patch_size :] = engine._pad_id
    shape = (-1, engine.data_size, training.micro_batch)
    mine = places.view(*shape)[:, engine.data_rank]
    return Batch(step, torch.stack(rows).view(*shape, length)[:, engine.data_rank], mine)


def main() -> None:
    worlds, out, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    for number, (world_size, cases) in enumerate(worlds):
        if rank < world_size:
            run_world(cases, out, f"file://{out}/rendezvous_{number}", rank, world_size)


def run_world(cases: list[dict[str, Any]], out: Path, meeting: str, rank: int, world_size: int) -> None:
    """Wait for the world's other ranks, which may be in an earlier world, and run its cases with them."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    world = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    for case in cases:
        report = run_case(case, world, out)
        if rank == 0:
            (out / f"{case['name']}.json").write_text(json.dumps(report))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run_case(case: dict[str, Any], world: Any, out: Path) -> dict[str, Any]:
    run = RunConfig.model_validate(case["run"])
    codec = None if run.lm.predicts_tokens else FixedCodec(run.vocab_size)
    report: dict[str, Any] = {}
    with_buckets_of(case.get("bucket"))
    try:
        engine = MegatronEngine(run, world, codec, case.get("pad_id"))
        for action in case["actions"]:
            ACTIONS[action["do"]](engine, run, report, out, **{k: v for k, v in action.items() if k != "do"})
    except CalmScaleError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    return report


def with_buckets_of(num_parameters: int | None) -> None:
    """Parameters of one bucket of Megatron's overlapped collectives; its own choice is one bucket for a tiny model."""
    DistributedDataParallelConfig.__init__.__defaults__ = tuple(
        num_parameters if field.name == "bucket_size" else default
        for field, default in zip(
            fields(DistributedDataParallelConfig),
            DistributedDataParallelConfig.__init__.__defaults__,
            strict=True,
        )
    )


def train(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        result = engine.train_step(batch_of(engine, run, step), run.lm.training.optimizer.lr)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (result.loss, result.grad_norm, result.skipped))
        report.setdefault("steps", []).append([result.loss, result.grad_norm, result.skipped])
        report["same_on_all_ranks"] = (
            report.get("same_on_all_ranks", True) and len(set(map(str, everyone))) == 1
        )


def save(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, name: str) -> None:
    (out / name).mkdir(exist_ok=True)
    dist.barrier()
    engine.save(out / name)


def save_async(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, name: str, step: int) -> None:
    """Train a step while the state before it is being written."""
    (out / name).mkdir(exist_ok=True)
    dist.barrier()
    write = engine.save_async(out / name)
    train(engine, run, report, out, step, step)
    write.result()
    dist.barrier()


def load(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, name: str) -> None:
    engine.load(out / name)
    report["steps_loaded"] = engine.steps


def evaluate(engine: Any, run: RunConfig, report: dict[str, Any], out: Path) -> None:
    report.setdefault("eval", []).append(engine.evaluate([batch_of(engine, run, 99)])["loss"])


def poison(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, rank: int) -> None:
    """From now on one gradient on one rank is infinite."""
    original = engine._pass

    def poisoned(*args: Any, **kwargs: Any) -> float:
        loss = original(*args, **kwargs)
        if dist.get_rank() == rank:
            next(engine.models[0].parameters()).main_grad.view(-1)[:] = float("inf")
        return loss

    engine._pass = poisoned


def drift(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, rank: int) -> None:
    """Change one replicated weight on one rank."""
    if dist.get_rank() == rank:
        with torch.no_grad():
            next(p for n, p in engine.models[-1].named_parameters() if n.endswith("layernorm.weight")).add_(
                1e-6
            )


def damage(engine: Any, run: RunConfig, report: dict[str, Any], out: Path, name: str) -> None:
    """Copies of a checkpoint: one with a key renamed, one whose index would run code, one without an index."""
    good = out / name
    for copy in ("half_renamed", "half_hostile", "half_nothing"):
        shutil.copytree(good, out / copy)
    index = pickle.loads((good / ".metadata").read_bytes())
    old, new = "model.decoder.final_layernorm.weight", "model.decoder.final_norm.weight"
    index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
    (out / "half_renamed" / ".metadata").write_bytes(pickle.dumps(index))
    index.planner_data = Hostile()
    hostile = io.BytesIO()
    pickle.dump(index, hostile)
    (out / "half_hostile" / ".metadata").write_bytes(hostile.getvalue())
    (out / "half_nothing" / ".metadata").unlink()


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("code ran while loading",))


ACTIONS = {
    "damage": damage,
    "train": train,
    "save": save,
    "save_async": save_async,
    "load": load,
    "evaluate": evaluate,
    "poison": poison,
    "drift": drift,
}

if __name__ == "__main__":
    main()
