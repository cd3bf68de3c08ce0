"""Curves, correlation, and the energy score as a ranking signal."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.brier import EvaluationError
from calm_scale.evaluation.curves import correlate, draw_correlation, draw_curves, trace
from calm_scale.evaluation.energy import score_texts


def sharpened(chain, temperature):
    powered = chain ** (1 / temperature)
    return powered / powered.sum(1, keepdim=True)


def test_sharper_laws_move_right(markov, chain, tmp_path):
    sequences = markov(chain, 4).sequences(10, 200)
    models = [(f"T {t}", markov(sharpened(chain, t), 4)) for t in (1.0, 0.7, 0.5)]
    points = trace(models, sequences, EvaluationConfig(bootstrap=100, num_samples=4))
    collisions = [p.collision for p in points]
    assert collisions == sorted(collisions)
    assert points[0].accuracy < points[2].accuracy
    draw_curves({"chain": points}, tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").stat().st_size > 1000


def test_correlation_of_known_numbers(tmp_path):
    result = correlate([1.0, 2.0, 3.0, 4.0], [8.0, 4.0, 2.0, None])
    assert result.num_points == 3
    assert result.spearman == pytest.approx(-1)
    assert result.pearson == pytest.approx(np.corrcoef([1, 2, 3], [8, 4, 2])[0, 1])
    assert correlate([1, 1, 2], [3.0, 3.0, 1.0]).spearman == pytest.approx(-1)
    scores = [3.0, 2.0, 1.0, None]
    drawn = draw_correlation([1.0, 2.0, 3.0, 4.0], scores, tmp_path / "fig3.png", ["a", "a", "b", "b"])
    assert (drawn.num_points, drawn.pearson) == (3, pytest.approx(-1))
    assert (tmp_path / "fig3.png").stat().st_size > 1000
    with pytest.raises(EvaluationError, match="at least 3"):
        correlate([1.0, 2.0], [1.0, None])


class Cycle:
    """Latent space = one-hot of the patch's last token (V numbers); the head expects the successor, with noise."""

    patch_size, vocab_size, device, shows = 2, 8, torch.device("cpu"), "latents"

    def hidden(self, tokens):
        return torch.nn.functional.one_hot(tokens[:, 1::2], 8).float()

    def draw_latents(self, hidden, num_samples, generator):
        after = hidden.roll(2, dims=-1)
        return after + 0.3 * torch.randn(num_samples, *hidden.shape, generator=generator)

    def encode(self, tokens):
        mean = torch.nn.functional.one_hot(tokens[..., -1], 8).float()
        return mean, torch.full_like(mean, -2.0)


def test_energy_ranks_the_expected_text_first():
    good, bad = [i % 8 for i in range(20)], [(3 * i) % 8 for i in range(20)]
    first, second = score_texts(Cycle(), [good, bad])
    assert first.per_token < second.per_token
    assert first.kind == "energy"
    assert (first.num_patches, first.num_unscored) == (9, 2)
    assert first.per_patch == pytest.approx(2 * first.per_token)
    assert score_texts(Cycle(), [bad, good])[1] == first


def test_context_is_not_scored_and_tails_are_counted():
    text = [0, 1, 2, 3, 4, 5, 6, 7, 0]
    result = score_texts(Cycle(), [text], num_context=[5])[0]
    assert (result.num_patches, result.num_unscored) == (2, 5)
    with pytest.raises(EvaluationError, match="no whole patch"):
        score_texts(Cycle(), [[1, 2, 3]])


def test_baseline_scores_by_cross_entropy(markov, chain):
    model = markov(chain, 1)
    result = score_texts(model, [[0, 0, 1]])[0]
    assert result.kind == "cross-entropy"
    assert result.per_token == pytest.approx(-float((chain[0, 0].log() + chain[0, 1].log()) / 2))
    with pytest.raises(EvaluationError, match="neither latents nor"):
        score_texts(SimpleNamespace(shows="samples"), [[0, 1]])
