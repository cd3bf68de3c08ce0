"""Run by test_learns.py: train the whole model on a Markov chain over patches and compare with the best possible.

The chain has 8 patches of 4 tokens that share prefixes, so Brier-1 … Brier-4 have different optima. An optimal model
scores Brier-n = Σ_prev π(prev) Σ_x P_n(x | prev)², known exactly. The autoencoder is trained here as well.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.autoencoder.objective import TrainingObjective, draw_noise
from calm_scale.config import RunConfig
from calm_scale.lm.patch_model import MegatronPatchModel
from calm_scale.runtime.noise import PositionNoise
from calm_scale.training.engine import Batch
from calm_scale.training.megatron.engine import MegatronEngine

K, V, POSITIONS, BATCH, STEPS, LR = 4, 8, 16, 16, 700, 4e-3
PATCHES = torch.tensor(
    [
        [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6], [0, 7, 3, 2],
        [5, 5, 1, 0], [5, 5, 1, 7], [6, 2, 4, 4], [3, 0, 0, 1],
    ]
)  # fmt: skip
RUN = {
    "name": "markov",
    "vocab_size": V,
    "patch_size": K,
    "autoencoder": {
        "model": {"latent_size": 8, "hidden_size": 32, "ffn_size": 64, "init_std": 0.1},
        "training": {"steps": 1, "global_batch": 1},
    },
    "lm": {
        "backbone": {
            "num_layers": 2,
            "hidden_size": 48,
            "ffn_size": 96,
            "num_heads": 4,
            "positions": POSITIONS,
            "init_std": 0.12,
        },
        "head": {"kind": "energy", "num_blocks": 1, "num_samples": 8, "num_posterior": 4, "noise_size": 32},
        "training": {"steps": STEPS, "global_batch": BATCH, "micro_batch": BATCH, "precision": "fp32"},
    },
}


def transition_law() -> torch.Tensor:
    """[8, 8] rows P(next | previous): a few likely successors each, none certain."""
    g = torch.Generator().manual_seed(3)
    weights = torch.rand(len(PATCHES), len(PATCHES), generator=g) ** 4 + 0.01
    return weights / weights.sum(1, keepdim=True)


def chains(law: torch.Tensor, count: int, g: torch.Generator) -> torch.Tensor:
    """[count, POSITIONS] patch indices."""
    states = [torch.randint(len(PATCHES), (count,), generator=g)]
    while len(states) < POSITIONS:
        states.append(torch.multinomial(law[states[-1]], 1, generator=g)[:, 0])
    return torch.stack(states, dim=1)


def train_autoencoder(run: RunConfig) -> Autoencoder:
    stage = run.autoencoder
    model = Autoencoder(stage.model, V, K)
    objective = TrainingObjective(model, stage.objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    tokens = PATCHES.repeat(16, 1)[None]
    valid = torch.ones_like(tokens, dtype=torch.bool)
    for step in range(150):
        noise = draw_noise(
            stage.objective, K, model.latent_size, PositionNoise(0, step, [0], range(tokens.shape[1]))
        )
        loss, _ = objective(tokens, valid, noise, 1 / tokens.numel(), 1 / tokens.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def train_model(run: RunConfig, codec: Autoencoder, law: torch.Tensor) -> MegatronPatchModel:
    world = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    engine = MegatronEngine(run, world, codec)
    g = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        tokens = PATCHES[chains(law, BATCH, g)].flatten(1)
        ids = torch.arange(BATCH) + step * BATCH
        decay = min(1.0, step / 20, max(0.05, (STEPS - step) / (0.4 * STEPS)))
        engine.train_step(Batch(step, tokens[None], ids[None]), LR * decay)
    return MegatronPatchModel(engine.models[0], run, codec)


def brier_shares(drawn: torch.Tensor, previous: torch.Tensor, law: torch.Tensor) -> list[float]:
    """Model Brier-n over the best possible, n = 1..4. drawn [S, R, K] at R places whose last patch is ``previous``."""
    num_samples = drawn.shape[0]
    shares = []
    for n in range(1, K + 1):
        outcomes, outcome_of = torch.unique(PATCHES[:, :n], dim=0, return_inverse=True)
        truth = torch.zeros(len(law), len(outcomes)).index_add_(1, outcome_of, law)[previous]
        hits = (drawn[:, :, None, :n] == outcomes).all(-1).double().mean(0)
        equal = (drawn[:, None, :, :n] == drawn[None, :, :, :n]).all(-1).sum((0, 1)).double()
        collisions = (equal - num_samples) / (num_samples * (num_samples - 1))
        score = (2 * (hits * truth).sum(-1) - collisions).mean()
        shares.append(float(score / truth.square().sum(-1).mean()))
    return shares


def main() -> None:
    torch.set_num_threads(1)
    run, law = RunConfig.model_validate(RUN), transition_law()
    codec = train_autoencoder(run)
    exact = codec.decode_ids(codec.encode(PATCHES)[0])
    model = train_model(run, codec, law)
    states = chains(law, 32, torch.Generator().manual_seed(9))
    hidden = model.hidden(PATCHES[states].flatten(1))[:, 1:].flatten(0, 1)
    previous = states[:, 1:].flatten()
    drawn = model.draw(hidden, 100, torch.Generator().manual_seed(2))
    frequency = (drawn[:, :, None] == PATCHES).all(-1).double().mean(0)
    of_state = torch.stack([frequency[previous == state].mean(0) for state in range(len(law))])
    distance = (of_state - law).abs().sum(-1).mean() / 2
    report = {
        "autoencoder_accuracy": float((exact == PATCHES).double().mean()),
        "brier_shares": brier_shares(drawn, previous, law),
        "mean_total_variation": float(distance),
        "distinct_draws": float((frequency > 0).sum(-1).double().mean()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
