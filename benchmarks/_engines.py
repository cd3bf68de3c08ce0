"""The training steps that are compared: the Megatron engine, the plain CALM, and plain layers with our head."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import _plain_calm as plain
import torch

from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
from calm_scale.config import RunConfig
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import PositionNoise

V, K, D, LAYERS, HEADS, FFN, LATENT = 8192, 4, 256, 4, 4, 704, 128
BATCH, PATCHES, N, M, LR = 2, 512, 8, 100, 3e-4


def run_config() -> RunConfig:
    """d 256, 4 layers, 1 head block, K 4, V 8192, 2 × 511 predicted positions, N 8, M 100, fp32."""
    training = {"steps": 1000, "global_batch": BATCH, "micro_batch": BATCH, "precision": "fp32"}
    return RunConfig.model_validate(
        {
            "name": "bench",
            "vocab_size": V,
            "patch_size": K,
            "autoencoder": {"model": {"latent_size": LATENT}, "training": {"steps": 1, "global_batch": 1}},
            "lm": {
                "backbone": {
                    "num_layers": LAYERS,
                    "hidden_size": D,
                    "ffn_size": FFN,
                    "num_heads": HEADS,
                    "positions": PATCHES,
                },
                "head": {"kind": "energy", "num_blocks": 1, "num_samples": N, "num_posterior": M},
                "training": training,
            },
        }
    )


def tokens() -> torch.Tensor:
    """[B, P·K] random ids."""
    return torch.randint(V, (BATCH, PATCHES * K), generator=torch.Generator().manual_seed(0))


def megatron_step() -> Callable[[], object]:
    """One step of the product's engine on one rank."""
    from calm_scale.training.engine import Batch
    from calm_scale.training.megatron.engine import MegatronEngine

    run = run_config()
    world = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    engine = MegatronEngine(run, world, _frozen_autoencoder(run))
    batch = Batch(1, tokens()[None], torch.arange(BATCH)[None])
    return lambda: engine.train_step(batch, LR)


def literal_step() -> Callable[[], object]:
    """One step of the plain PyTorch CALM."""
    encoder = plain.Encoder(V, K, 512, 1280, LATENT)
    model = plain.PlainCalm(_plain_backbone(), plain.RepeatedHead(D, LATENT, 1), encoder, N, M)
    patches = tokens().view(BATCH, PATCHES, K)
    return _optimized(model, lambda: model(patches))


def same_model_step() -> Callable[[], object]:
    """Plain PyTorch layers with the product's head, loss and encoder: what Megatron's machinery is compared with."""
    codec = _frozen_autoencoder(run_config())
    backbone = _plain_backbone()
    head = EnergyHead(D, LATENT, num_blocks=1, num_samples=N, num_posterior=M)
    patches = tokens().view(BATCH, PATCHES, K)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            mean, log_std = codec.encode(patches[:, 1:])
        noise = PositionNoise(0, 0, range(BATCH), range(PATCHES - 1))
        return head.loss(backbone(patches)[:, :-1], mean, log_std, noise).mean()

    return _optimized(torch.nn.ModuleList([backbone, head]), loss)


def _plain_backbone() -> plain.Backbone:
    return plain.Backbone(V, K, D, LAYERS, HEADS, FFN)


def _frozen_autoencoder(run: RunConfig) -> FrozenAutoencoder:
    return FrozenAutoencoder(Autoencoder(run.autoencoder.model, V, K))


def _optimized(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step
