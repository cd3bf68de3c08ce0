"""One draw nearer to the others: what the scale does to latents, ids and reports, and what refuses it."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.evaluation import EvaluationConfig, GenerationConfig, protocol_name
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.sampling.one_draw import ONE_DRAW
from calm_scale.sampling.temperature import TemperedModel


class NormalModel:
    """Latents N(h, s²) around the hidden state h, one dimension; a latent's id is its nearest whole number."""

    patch_size, vocab_size, device, shows = 1, 64, torch.device("cpu"), "latents"

    def draw_latents(self, hidden, num_samples, generator, noise_scale=1.0):
        noise = torch.randn(num_samples, len(hidden), 1, generator=generator)
        return hidden + noise_scale * noise

    def decode_ids(self, latents):
        return latents.round().clamp(0, self.vocab_size - 1).long()

    def draw(self, hidden, num_samples, generator):
        return self.decode_ids(self.draw_latents(hidden, num_samples, generator))


def nearer(kind: str, scale: float, num_mean: int = 50) -> TemperedModel:
    settings = GenerationConfig(algorithm=kind, temperature=scale, num_candidates=num_mean)
    return TemperedModel(NormalModel(), settings.algorithm, settings)


@pytest.mark.parametrize("kind", ONE_DRAW)
@pytest.mark.parametrize("scale", [0.25, 0.5])
def test_latents_spread_by_the_scale(kind: str, scale: float) -> None:
    """Var = s² for scaled noise; s² + (1 − s²)/n for a latent and the mean of n draws it is one of."""
    model = nearer(kind, scale)
    drawn: list[torch.Tensor] = []
    model.model.decode_ids = lambda latents: drawn.append(latents) or NormalModel().decode_ids(latents)
    model.draw(torch.full((400, 1), 30.0), 8, torch.Generator().manual_seed(0))
    want = scale**2 if kind == "noise_scale" else scale**2 + (1 - scale**2) / 50
    spread = torch.cat([part.flatten() for part in drawn]).var()
    assert spread == pytest.approx(want, rel=0.1)  # 3200 draws: a deviation of 2.5 %
    assert (model.tally.num_patches, model.tally.num_fallbacks) == (3200, 0)


@pytest.mark.parametrize("kind", ONE_DRAW)
def test_scale_one_is_the_plain_draw(kind: str) -> None:
    hidden = torch.full((20, 1), 30.0)
    plain = TemperedModel(NormalModel(), "plain", GenerationConfig())
    asked = nearer(kind, 1.0)
    draws = [model.draw(hidden, 4, torch.Generator().manual_seed(3)) for model in (plain, asked)]
    assert torch.equal(*draws)
    assert asked.sampler == "plain, T = 1"


def test_the_energy_head_scales_its_noise_after_the_norm() -> None:
    head = EnergyHead(16, 4, num_blocks=1, noise_size=8, init_std=0.5)
    generator = torch.Generator().manual_seed(0)
    head.reset_parameters(0.5, generator)
    torch.nn.init.normal_(head.final_layer.linears[2].weight, generator=generator)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    def latents(scale: float | None, noise_factor: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        if scale is not None:
            return head.sample_nearer(hidden, 64, generator, scale)
        noise = torch.rand(5, 64, 8, generator=generator) - 0.5
        return head(hidden, noise * noise_factor).movedim(-2, 0)

    with torch.no_grad():
        head.noise_embd.bias.zero_()
        head.norm_noise.bias.zero_()
        assert torch.equal(latents(1.0), head.sample(hidden, 64, torch.Generator().manual_seed(2)))
        undone = (latents(None, 0.5) - latents(None)).abs().max()
        assert undone < 0.01 * latents(None).std(), (
            "a scale before the norm changes nothing but its epsilon's share"
        )
        deviation = [latents(scale).std(0).mean().item() for scale in (1.0, 0.5, 0.1)]
        assert deviation[0] > 1.2 * deviation[1] > 2.4 * deviation[2] > 0


def test_protocols_of_different_scales_differ() -> None:
    def name(**evaluation: object) -> str:
        settings = EvaluationConfig.model_validate(evaluation).model_dump()
        return protocol_name({"evaluation": settings, "patch_size": 4})

    names = {
        name(temperature=t, algorithm=a, num_candidates=n)
        for t, a, n in [
            (0.5, "shrink", 10),
            (0.5, "shrink", 20),
            (0.5, "noise_scale", 10),
            (0.4, "noise_scale", 10),
        ]
    }
    assert len(names) == 4
    assert name(temperature=0.5, algorithm="noise_scale", num_candidates=7) in names, "it has no candidates"


def run(kind: str, algorithm: str, temperature: float) -> RunConfig:
    softmax = kind == "softmax"
    backbone = {"num_layers": 1, "hidden_size": 16, "ffn_size": 16, "num_heads": 2, "positions": 8}
    lm = {"backbone": backbone, "head": {"kind": kind}, "training": {"steps": 1, "global_batch": 1}}
    values = {"name": "x", "vocab_size": 64, "patch_size": 1 if softmax else 2, "lm": lm}
    generation = {"algorithm": algorithm, "temperature": temperature}
    return RunConfig.model_validate({**values, "generation": generation})


def test_a_head_that_cannot_is_refused_before_it_is_loaded() -> None:
    assert run("energy", "noise_scale", 0.5).generation.algorithm == "noise_scale"
    assert run("flow", "shrink", 0.5).generation.algorithm == "shrink"
    assert run("flow", "noise_scale", 1.0).generation.temperature == 1
    with pytest.raises(
        ValidationError, match=r"generation\.algorithm noise_scale: lm\.head\.kind flow has no noise"
    ):
        run("flow", "noise_scale", 0.5)
    with pytest.raises(ValidationError, match=r"shrink: lm\.head\.kind softmax draws no latents"):
        run("softmax", "shrink", 0.5)
    with pytest.raises(ConfigError, match="has no"):
        settings = GenerationConfig(algorithm="shrink", temperature=0.5)
        without = NormalModel()
        without.shows = "samples"
        TemperedModel(without, "shrink", settings)
