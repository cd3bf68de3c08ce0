"""What one gloo rank measures: ``python rank_program.py SUITE FOLDER OUT``. Not a test itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calm_scale.config.autoencoder import (
    AutoencoderModelConfig,
    AutoencoderStage,
    ObjectiveConfig,
    ZeroConfig,
)
from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.world import World, init_world
from calm_scale.training.deepspeed.engine import DeepSpeedEngine
from calm_scale.training.deepspeed.state import EngineStateError
from calm_scale.training.engine import Batch, StepResult

V, K, SEED, LR = 37, 2, 11, 1e-2
GLOBAL_BATCH, LENGTH, PAD = 24, 12, 0
SIZES = AutoencoderModelConfig(hidden_size=10, ffn_size=14, latent_size=7, init_std=0.2)
OBJECTIVE = ObjectiveConfig(kl_weight=0.05, kl_floor=0.3)
CLIP = 0.5
STAGES = (0, 1, 2, 3)


def global_tokens(step: int) -> torch.Tensor:
    """[G, S]; the valid lengths differ from sequence to sequence, so counts differ from rank to rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, V, (GLOBAL_BATCH, LENGTH), generator=generator)
    for row in range(GLOBAL_BATCH):
        tokens[row, 1 + (row * 5 + step) % LENGTH :] = PAD
    return tokens


def batch(world: World, step: int, accumulation: int) -> Batch:
    places = torch.arange(GLOBAL_BATCH).view(accumulation, world.world_size, -1)[:, world.rank]
    ids = places + (step - 1) * GLOBAL_BATCH
    return Batch(step, global_tokens(step)[places], ids)


class Trial:
    """One engine and its batches."""

    def __init__(
        self, world: World, zero: int, accumulation: int, precision: str = "fp32", **more: Any
    ) -> None:
        self.world, self.accumulation = world, accumulation
        stage = AutoencoderStage(
            model=SIZES,
            objective=OBJECTIVE,
            training=TrainingConfig(
                steps=9,
                global_batch=GLOBAL_BATCH,
                micro_batch=GLOBAL_BATCH // accumulation // world.world_size,
                precision=precision,  # type: ignore[arg-type]
                optimizer={"clip_norm": CLIP},  # type: ignore[arg-type]
            ),
            zero=ZeroConfig(stage=zero, **more),  # type: ignore[arg-type]
            evaluation_noise=(0.3,),
        )
        self.engine = DeepSpeedEngine(stage, vocab_size=V, patch_size=K, seed=SEED, world=world, pad_id=PAD)

    def steps(self, first: int, last: int) -> list[StepResult]:
        return [
            self.engine.train_step(batch(self.world, step, self.accumulation), LR)
            for step in range(first, last + 1)
        ]

    def evaluate(self) -> dict[str, float]:
        """A whole batch, and one of which the first three sequences count: most ranks and passes hold none of them."""
        whole, last = (batch(self.world, step, self.accumulation) for step in (1, 2))
        counted = last.sample_ids < GLOBAL_BATCH + 3
        return self.engine.evaluate([whole, replace(last, counted=counted)])

    def saved(self, directory: Path) -> Path:
        if self.world.is_first:
            directory.mkdir()
        self.world.barrier()
        self.engine.save(directory)
        self.world.barrier()
        return directory


def flat(results: list[StepResult]) -> list[list[float]]:
    return [[result.loss, result.grad_norm, result.metrics["cross_entropy"]] for result in results]


def checksum(engine: DeepSpeedEngine) -> dict[str, list[float]]:
    return {
        name: [float(w.double().sum()), float(w.double().square().sum())]
        for name, w in engine.weights().items()
    }


def layouts(world: World, folder: Path) -> dict[str, Any]:
    """The same three steps at every ZeRO stage and at two accumulations; then a checkpoint and two steps more."""
    out: dict[str, Any] = {}
    for zero in STAGES:
        for accumulation in (1, 4):
            trial = Trial(world, zero, accumulation)
            out[f"zero{zero} acc{accumulation}"] = [*flat(trial.steps(1, 3)), [*trial.evaluate().values()]]
            if accumulation == 4:
                trial.saved(folder / f"from{world.world_size}_zero{zero}")
                out[f"zero{zero} on"] = flat(trial.steps(4, 5))
                out[f"zero{zero} weights"] = checksum(trial.engine)
    return out


def resume(world: World, folder: Path) -> dict[str, Any]:
    """Five steps straight on, against five after a save into a new engine: must be bit-equal."""
    out: dict[str, Any] = {}
    kinds: list[dict[str, Any]] = [{"zero": z, "precision": p} for z in STAGES for p in ("fp32", "bf16")]
    kinds += [{"zero": z, "offload": "cpu"} for z in (1, 3)]
    for kind in kinds:
        name = " ".join(str(value) for value in kind.values())
        straight = Trial(world, accumulation=2, **kind)
        straight.steps(1, 3)
        directory = straight.saved(folder / name.replace(" ", "_"))
        on = straight.steps(4, 8)
        again = Trial(world, accumulation=2, **kind)
        again.engine.load(directory)
        again.evaluate()
        resumed = again.steps(4, 8)
        here, there = straight.engine.weights(), again.engine.weights()
        out[name] = {
            "same_steps": [asdict(result) for result in on] == [asdict(result) for result in resumed],
            "same_weights": all(torch.equal(here[key], there[key]) for key in here),
            "moved": on[0].loss != on[-1].loss,
        }
    return out


def nonfinite(world: World, folder: Path) -> dict[str, Any]:
    """An Inf in one gradient element on the last rank at step 3."""
    out: dict[str, Any] = {}
    for zero in STAGES:
        hit, twin = Trial(world, zero, 2), Trial(world, zero, 2)
        hit.steps(1, 2), twin.steps(1, 2)
        before = hit.engine.weights()
        weight = hit.engine._model.encoder.squeeze_layer.weight
        handle = weight.register_hook(_poison) if world.rank == world.world_size - 1 else None
        (result,) = hit.steps(3, 3)
        if handle is not None:
            handle.remove()
        after = hit.engine.weights()
        out[f"zero{zero}"] = {
            "skipped": result.skipped,
            "grad_norm_finite": result.grad_norm < float("inf"),
            "unchanged": all(torch.equal(before[key], after[key]) for key in before),
            "goes_on": hit.steps(4, 5) == twin.steps(4, 5),
            "finite": hit.engine.is_finite(),
        }
    with torch.no_grad():
        for partition in hit.engine._state.partitions[: 1 - world.rank]:
            partition[0] = float("nan")
    out["finite after a NaN on rank 0"] = hit.engine.is_finite()
    return out


def _poison(gradient: torch.Tensor) -> torch.Tensor:
    poisoned = gradient.clone()
    poisoned.view(-1)[3] = float("inf")
    return poisoned


def across(world: World, folder: Path) -> dict[str, Any]:
    """Go on from what two ranks saved, on this many ranks and at every stage; and refusals."""
    out: dict[str, Any] = {}
    for zero in STAGES:
        trial = Trial(world, zero, 4)
        trial.engine.load(folder / f"from2_zero{(zero + 1) % 4}")
        out[f"zero{zero}"] = flat(trial.steps(4, 5))
        out[f"zero{zero} weights"] = checksum(trial.engine)
    out["refusals"] = [
        _refusal(trial.engine, folder / "nothing here"),
        *_damaged(world, trial.engine, folder),
    ]
    return out


def _damaged(world: World, engine: DeepSpeedEngine, folder: Path) -> list[str]:
    good = folder / "from2_zero1"
    out = []
    for kind in ("truncated", "missing", "foreign"):
        bad = folder / f"{kind}_{world.world_size}_{world.rank}"
        bad.mkdir()
        for path in good.iterdir():
            (bad / path.name).write_bytes(path.read_bytes())
        shard = sorted(bad.glob("*.safetensors"))[0]
        if kind == "truncated":
            shard.write_bytes(shard.read_bytes()[:100])
        elif kind == "missing":
            shard.unlink()
        else:
            index = json.loads((bad / "index.json").read_text())
            index["shapes"]["encoder.norm.weight"] = [99]
            (bad / "index.json").write_text(json.dumps(index))
        before = checksum(engine)
        out.append(_refusal(engine, bad))
        assert checksum(engine) == before, "a refused load changed the weights"
    return out


def _refusal(engine: DeepSpeedEngine, directory: Path) -> str:
    try:
        engine.load(directory)
    except EngineStateError as error:
        return str(error)
    return "accepted"


def plain(world: World, folder: Path) -> dict[str, Any]:
    """The same five steps in plain PyTorch: no DeepSpeed, one process, one batch."""
    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.autoencoder.objective import clipped_kl, draw_noise
    from calm_scale.runtime.noise import PositionNoise

    model = Autoencoder(SIZES, V, K, seed=SEED)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    out = []
    for step in range(1, 6):
        ids = global_tokens(step).view(GLOBAL_BATCH, -1, K)
        valid = ids != PAD
        samples = range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
        drawn = draw_noise(
            OBJECTIVE, K, SIZES.latent(K), PositionNoise(SEED, step, samples, range(ids.shape[1]))
        )
        assert drawn.dropped_tokens is not None and drawn.kept_latents is not None
        mean, log_std = model.encode(ids.masked_fill(drawn.dropped_tokens, 0))
        z = (mean + log_std.exp() * drawn.posterior) * drawn.kept_latents / (1 - OBJECTIVE.latent_dropout)
        ce = nn.functional.cross_entropy(model.decode(z)[valid], ids[valid])
        kl = clipped_kl(mean, log_std, OBJECTIVE.kl_floor)[valid.any(-1)].mean()
        loss = K * ce + OBJECTIVE.kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        out.append([loss.item(), norm.item(), ce.item()])
    return {"steps": out}


SUITES: dict[str, Callable[[World, Path], dict[str, Any]]] = {
    "layouts": layouts,
    "resume": resume,
    "nonfinite": nonfinite,
    "across": across,
    "plain": plain,
}


def main() -> None:
    suites, folder, out = sys.argv[1].split("+"), Path(sys.argv[2]), Path(sys.argv[3])
    world = init_world(device="cpu")
    results = {suite: SUITES[suite](world, folder) for suite in suites}
    out.write_text(json.dumps(results))
    world.close()


if __name__ == "__main__":
    main()
