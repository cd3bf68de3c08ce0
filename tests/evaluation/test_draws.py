"""An evaluation at a temperature tells what its draws cost and which of them were not by the asked-for rule."""

from __future__ import annotations

import pytest
import torch

from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.report import fallback_warning, load, save, table
from calm_scale.sampling.temperature import TemperedModel

FLAT = torch.full((7, 7), 1 / 7)


def tempered(model, **changes):
    config = EvaluationConfig(bootstrap=100, temperature=1 / 6, **changes)
    return TemperedModel(model, config.algorithm, config), config


@pytest.mark.parametrize("algorithm", ["exact", "batch"])
def test_draws_and_fallbacks_of_all_sequences_are_reported(markov, algorithm, tmp_path):
    """At T = 1/6 a flat law over 7^4 patches never repeats one six times: every patch falls back."""
    law = markov(FLAT, 4)
    model, config = tempered(law, algorithm=algorithm, num_candidates=7, draw_budget=12)
    evaluate(model, law.sequences(1, 16), config)  # draws of an earlier call are not this one's
    result = evaluate(model, law.sequences(3, 32), config)
    per_patch = 7 if algorithm == "batch" else 12 + 7
    num_patches = 3 * 7 * config.num_samples
    assert result.execution["draws"] == {
        "patches": num_patches,
        "draws": per_patch * num_patches,
        "fallbacks": num_patches,
    }
    assert "N = 7" in result.protocol["sampler"]
    save(result, tmp_path / "a.json")
    again = load(tmp_path / "a.json")
    assert f"{num_patches} fall-backs" in table(again).caption
    assert f"{num_patches} of {num_patches} patches fell back" in fallback_warning(again)


def test_ranks_draws_are_summed(markov):
    law = markov(FLAT, 4)
    sequences = law.sequences(5, 32)

    class Other:
        rank, world_size = 1, 2

        def everywhere(self, work):
            self.said = work()
            return [[], self.said]

    class First:
        rank, world_size = 0, 2

        def everywhere(self, work):
            return [work(), other.said]

    model, config = tempered(law, num_candidates=7)
    alone = evaluate(model, sequences, config)
    other = Other()
    evaluate(model, sequences, config, crew=other)
    both = evaluate(model, sequences, config, crew=First())
    assert both.execution["draws"] == alone.execution["draws"]


def test_nothing_is_warned_of_where_nothing_fell_back(markov, chain):
    law = markov(chain, 4)
    result = evaluate(law, law.sequences(3, 32), EvaluationConfig(bootstrap=100))
    assert "draws" not in result.execution
    assert fallback_warning(result) is None
    plain = TemperedModel(law, "batch", EvaluationConfig())
    result = evaluate(plain, law.sequences(3, 32), EvaluationConfig(bootstrap=100))
    assert result.execution["draws"]["fallbacks"] == 0
    assert fallback_warning(result) is None
    assert "fall-back" not in table(result).caption
