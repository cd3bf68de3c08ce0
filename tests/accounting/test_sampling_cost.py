"""Expected draws against a simulation of the exact algorithm; costs of candidates and the crossover."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from calm_scale.accounting.compared_models import baseline_at, baseline_of, paper_model, with_patch_size
from calm_scale.accounting.costs import brier_per_token, token_costs
from calm_scale.accounting.model_components import lm_parameters
from calm_scale.accounting.sampling_cost import draws_at, expected_draws, expected_draws_uniform, per_token
from calm_scale.config import RunConfig

MakeRun = Callable[..., RunConfig]


def simulate(law: list[float], temperature: float, rng: random.Random) -> int:
    """Draws of one run of the exact algorithm."""
    whole = int(1 / temperature + 1e-9)
    alpha = 1 / temperature - whole
    draws = 0
    while True:
        first = rng.choices(range(len(law)), law, k=whole)
        draws += whole
        if len(set(first)) > 1:
            continue
        if alpha < 1e-9:
            return draws
        for i in range(1, 10_000):
            draws += 1
            if rng.choices(range(len(law)), law)[0] == first[0]:
                return draws
            if rng.random() < alpha / i:
                break


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.5, 0.4, 1 / 3])
def test_expected_draws_match_a_simulation(temperature: float) -> None:
    law, rng = [0.5, 0.3, 0.2], random.Random(7)
    mean = sum(simulate(law, temperature, rng) for _ in range(20_000)) / 20_000
    assert expected_draws(law, temperature) == pytest.approx(mean, rel=0.05)


def test_known_expectations() -> None:
    assert expected_draws([0.9, 0.1], 1.0) == 1
    assert expected_draws([1.0], 0.5) == 2
    assert expected_draws_uniform(10, 0.5) == pytest.approx(20)
    assert expected_draws_uniform(10, 1 / 3) == pytest.approx(300)
    with pytest.raises(ValueError, match="temperature"):
        expected_draws([1.0], 1.5)


def test_candidates_cost_and_invert() -> None:
    config = paper_model("CALM-M")
    assert per_token(config, 1) == token_costs(config).inference
    assert draws_at(config, per_token(config, 37)) == pytest.approx(37)
    assert draws_at(config, 1.0) == 0


def test_brier_evaluation_of_small_patches_rolls_forward(tiny: MakeRun) -> None:
    at_four, at_two = (brier_per_token(tiny(patch_size=k)) * k for k in (4, 2))
    samples = 2
    config = tiny(patch_size=2)
    assert at_two == pytest.approx(2 * (per_token(config, samples) + samples * per_token(config, 1)))
    assert at_four == pytest.approx(4 * per_token(tiny(patch_size=4), samples))


def test_patch_sizes_and_baselines() -> None:
    config = paper_model("CALM-L")
    for k in (1, 2, 4, 8):
        variant = with_patch_size(config, k)
        assert variant.latent_size == 32 * k
        assert variant.require_lm().backbone == config.require_lm().backbone
    assert token_costs(with_patch_size(config, 4)) == token_costs(config)
    assert lm_parameters(baseline_of(config)) == lm_parameters(paper_model("Transformer-L"))
    target = token_costs(config).training
    assert token_costs(baseline_at(config, target)).training == pytest.approx(target, rel=0.05)
