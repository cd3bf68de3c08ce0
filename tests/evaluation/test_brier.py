"""The estimator against closed forms: no bias, the variance theory predicts, and never a number for nonsense."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calm_scale.evaluation.brier import (
    EvaluationError,
    brier,
    composite_of,
    counts_by_document,
    match_counts,
    score,
)

V, K = 3, 4


def random_law(seed, concentration=0.3):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.dirichlet(np.full(V**K, concentration)))


def draw(law, shape, generator):
    flat = torch.multinomial(law, int(np.prod(shape)), True, generator=generator)
    return torch.stack([flat // V**j % V for j in reversed(range(K))], -1).reshape(*shape, K)


def prefix_laws(law):
    """Laws of the first 1..4 tokens."""
    return [law.reshape(V**n, -1).sum(1) for n in range(1, K + 1)]


@pytest.mark.parametrize("num_samples", [2, 4, 8])
def test_unbiased_within_three_standard_errors(num_samples):
    """E over y ~ Q of Brier-n is 2 Σ P Q − Σ P²."""
    p, q = random_law(1), random_law(2)
    generator = torch.Generator().manual_seed(num_samples)
    num_positions = 40_000
    truth = draw(q, (1, num_positions), generator)
    samples = draw(p, (num_samples, 1, num_positions), generator)
    hits, pairs, counted = match_counts(samples, truth)
    assert counted.all()
    terms = 2 * hits.double() / num_samples - 2 * pairs.double() / (num_samples * (num_samples - 1))
    result = brier(samples, truth)
    for n, (pn, qn) in enumerate(zip(prefix_laws(p), prefix_laws(q), strict=True)):
        expected = float(2 * (pn * qn).sum() - (pn**2).sum())
        assert result.components[n] == pytest.approx(float(terms[n].mean()), abs=1e-12)
        standard_error = float(terms[n].std()) / num_positions**0.5
        assert abs(result.components[n] - expected) < 3 * standard_error
    assert result.accuracy[0] == pytest.approx(float((prefix_laws(p)[0] * prefix_laws(q)[0]).sum()), abs=0.01)
    assert result.collision[3] == pytest.approx(float((p**2).sum()), abs=0.01)


def variance_of(pn, num_samples):
    """Variance at a fixed truth y of the U-statistic with kernel 1{a=y} + 1{b=y} − 1{a=b}: Hoeffding's two terms."""
    y = int(pn.argmax())
    first = torch.zeros_like(pn)
    first[y] = 1.0
    g = first + pn[y] - pn  # E[kernel | one sample]
    zeta1 = float((pn * g**2).sum() - (pn * g).sum() ** 2)
    a, b = torch.meshgrid(torch.arange(len(pn)), torch.arange(len(pn)), indexing="ij")
    kernel = (a == y).double() + (b == y).double() - (a == b).double()
    weight = pn[:, None] * pn[None]
    zeta2 = float((weight * kernel**2).sum() - (weight * kernel).sum() ** 2)
    s = num_samples
    return (4 * (s - 2) * zeta1 + 2 * zeta2) / (s * (s - 1))


@pytest.mark.parametrize("num_samples", [2, 3, 8])
def test_variance_is_the_u_statistics(num_samples):
    p = random_law(5)
    generator = torch.Generator().manual_seed(7)
    num_positions = 60_000
    for n, pn in enumerate(prefix_laws(p)):
        digits = int(pn.argmax())
        y = torch.tensor([digits // V**j % V for j in reversed(range(n + 1))] + [0] * (K - n - 1))
        samples = draw(p, (num_samples, 1, num_positions), generator)
        hits, pairs, _ = match_counts(samples, y.expand(1, num_positions, K))
        terms = 2 * hits[n].double() / num_samples - 2 * pairs[n].double() / (num_samples * (num_samples - 1))
        measured = float(terms.var())
        expected = variance_of(pn, num_samples)
        fourth = float(((terms - terms.mean()) ** 4).mean())
        error = ((fourth - measured**2) / num_positions) ** 0.5
        assert abs(measured - expected) < 4 * error
    assert variance_of(p, 8) < variance_of(p, 4) < variance_of(p, 2)


def test_a_constant_wrong_model_is_undefined_not_100():
    truth = torch.zeros(4, 50, K, dtype=torch.int64)
    result = brier(torch.ones(2, 4, 50, K, dtype=torch.int64), truth)
    assert result.components == (-1.0, -1.0, -1.0, -1.0)
    assert result.brierlm is None
    assert result.brierlm_interval is None
    assert "Brier-1, Brier-2, Brier-3, Brier-4" in result.undefined_because


def test_two_negative_components_are_undefined():
    assert np.isnan(composite_of(np.array([[0.5, 0.5, -0.1, -0.1], [0.5, 0.5, 0.0, 0.5]]))).all()


def test_a_perfect_model_scores_100():
    truth = torch.randint(V, (4, 50, K), generator=torch.Generator().manual_seed(0))
    result = brier(truth.expand(3, -1, -1, -1), truth)
    assert result.brierlm == pytest.approx(100.0)
    assert result.brierlm_interval == pytest.approx((100.0, 100.0))


def test_components_average_before_the_geometric_mean():
    """Two documents with different numbers of positions: Brier-n is over positions, not over documents."""
    truth = torch.zeros(1, 4, K, dtype=torch.int64)
    samples = torch.zeros(2, 1, 4, K, dtype=torch.int64)
    samples[0, 0, 3] = 1  # one of four positions: a sample is wrong, so its term is 1 − 0 = 1 of 2 hits
    counts = counts_by_document(samples, truth, torch.tensor([[0, 0, 0, 1]]))
    assert score(counts).components == (1.0, 1.0, 1.0, 1.0)
    samples[1, 0, 3] = 1
    counts = counts_by_document(samples, truth, torch.tensor([[0, 0, 0, 1]]))
    assert score(counts).components == (0.5, 0.5, 0.5, 0.5)


def test_interval_covers_the_truth_and_is_deterministic():
    """Of 60 repeated evaluations of 60 documents, the 90 % interval of Brier-1 misses at most 14."""
    p, q = random_law(1), random_law(2)
    expected = float(2 * (prefix_laws(p)[0] * prefix_laws(q)[0]).sum() - (prefix_laws(p)[0] ** 2).sum())
    misses = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        truth = draw(q, (60, 20), generator)
        result = brier(draw(p, (2, 60, 20), generator), truth, bootstrap=200, confidence=0.9, seed=seed)
        low, high = result.component_intervals[0]
        misses += not low <= expected <= high
        if seed == 0:
            generator = torch.Generator().manual_seed(seed)
            truth = draw(q, (60, 20), generator)
            assert result == brier(draw(p, (2, 60, 20), generator), truth, bootstrap=200, confidence=0.9)
    assert 0 < misses <= 14


def test_short_windows_give_components_but_no_composite():
    truth = torch.zeros(2, 5, 2, dtype=torch.int64)
    result = brier(torch.zeros(2, 2, 5, 2, dtype=torch.int64), truth)
    assert result.components == (1.0, 1.0, None, None)
    assert result.brierlm is None
    assert result.num_positions == (10, 10, 0, 0)


def test_masked_positions_do_not_count():
    truth = torch.zeros(1, 2, K, dtype=torch.int64)
    valid = torch.tensor([[[True, True, False, True], [True] * 4]])
    _, _, counted = match_counts(torch.zeros(2, 1, 2, K, dtype=torch.int64), truth, valid)
    assert counted[:, 0].T.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (2, 2, 3), (2, 3, 3, 4)])
def test_shapes_are_checked(shape):
    with pytest.raises(EvaluationError):
        match_counts(torch.zeros(shape, dtype=torch.int64), torch.zeros(2, 3, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"documents": torch.full((2, 3), -1)}, "ids from 0 on; got -1"),
        (
            {"documents": torch.zeros(3, 2, dtype=torch.int64)},
            r"documents must be whole ids \[B, P\] = \[2, 3\]",
        ),
        ({"documents": torch.zeros(2, 3)}, "of torch.float32"),
        ({"valid": torch.ones(2, 3, 2, dtype=torch.bool)}, r"valid must be .* got \[2, 3, 2\]"),
        ({"confidence": 2}, "confidence must lie between 0 and 1"),
        ({"bootstrap": 0}, "at least 1 resampling"),
    ],
)
def test_what_does_not_belong_to_the_samples_is_refused(more, words):
    samples = torch.zeros(2, 2, 3, 4, dtype=torch.int64)
    with pytest.raises(EvaluationError, match=words):
        brier(samples, samples[0], **more)
