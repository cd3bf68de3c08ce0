"""Algorithms 1 and 2 against the laws they promise (χ²), Theorem 2, and the worked example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from calm_scale.config import ConfigError
from calm_scale.config.evaluation import GenerationConfig
from calm_scale.sampling.batch import SamplingError, choose, distinct, exponent, log_weights, take
from calm_scale.sampling.exact import expected_draws, sample_exact
from calm_scale.sampling.law import tempered_law
from calm_scale.sampling.temperature import TemperedModel, check_budget, draw_rows

LAW = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05], dtype=torch.float64)


def sharpened(law, temperature):
    p = law.double() ** (1 / temperature)
    return p / p.sum()


def chi_squared_p(observed, law):
    return stats.chisquare(observed.numpy(), (law * observed.sum()).numpy()).pvalue


@pytest.mark.parametrize(
    "temperature, expected",
    [(1.0, (1, 0)), (1 / 2, (2, 0)), (1 / 3, (3, 0)), (1 / 7, (7, 0)), (0.4, (2, 0.5)), (0.8, (1, 0.25))],
)
def test_exponent_splits_one_over_t(temperature, expected):
    at = exponent(temperature)
    assert (at.n, round(at.alpha, 9)) == expected


@pytest.mark.parametrize("temperature", [0, -1, 1.01, float("nan")])
def test_temperatures_without_an_algorithm_are_refused(temperature):
    with pytest.raises(SamplingError, match="temperature"):
        exponent(temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.9, 0.7, 0.5, 0.4, 1 / 3, 0.3])
def test_exact_law_and_theorem_2(law_model, generator, temperature):
    """Algorithm 1's output passes χ² against P^{1/T}/Z; its mean draws lie within 4 standard errors of Theorem 2."""
    model = law_model(5, 1)
    num_rows = 20_000
    hidden = LAW.expand(num_rows, 5)
    result = sample_exact(
        lambda rows, n: model.draw(hidden[rows], n, generator),
        num_rows,
        temperature,
        generator,
        budget=10**6,
    )
    assert not result.fell_back.any()
    counts = result.patches[:, 0].bincount(minlength=5)
    assert chi_squared_p(counts, sharpened(LAW, temperature)) > 1e-3
    used = result.used.double()
    error = used.std() / num_rows**0.5
    assert abs(used.mean() - expected_draws(LAW, temperature)) <= 4 * error + 1e-9
    assert result.made == model.num_draws >= int(result.used.sum())


def test_the_chi_squared_test_can_fail(law_model, generator):
    model = law_model(5, 1)
    draws = model.draw(LAW.expand(20_000, 5), 1, generator)[0, :, 0].bincount(minlength=5)
    assert chi_squared_p(draws, sharpened(LAW, 0.9)) < 1e-6


def test_exact_rows_keep_their_own_laws(law_model, generator):
    """Two rows with different laws interleaved: no draw of one decides the other."""
    model = law_model(2, 2)
    laws = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.05, 0.15, 0.3, 0.5]], dtype=torch.float64)
    hidden = laws.repeat(8000, 1)
    result = sample_exact(
        lambda rows, n: model.draw(hidden[rows], n, generator), 16_000, 0.45, generator, budget=10**6
    )
    codes = model.code(result.patches).view(-1, 2)
    for row in range(2):
        assert chi_squared_p(codes[:, row].bincount(minlength=4), sharpened(laws[row], 0.45)) > 1e-3


def test_budget_is_kept_and_fallbacks_are_told(law_model, generator):
    """A uniform law over 10 000 patches at T = 1/4 cannot collide: every row falls back within its budget."""
    model = law_model(10, 4)
    hidden = torch.ones(3, 10_000, dtype=torch.float64)
    result = sample_exact(
        lambda rows, n: model.draw(hidden[rows], n, generator),
        3,
        0.25,
        generator,
        budget=100,
        fallback_candidates=50,
    )
    assert result.fell_back.all()
    assert (result.used <= 100).all()
    assert result.made == model.num_draws <= 3 * 150
    assert result.patches.shape == (3, 4)


def test_worked_example_of_algorithm_2(generator):
    """A three times, B twice, n = 2: weights C(3,2) = 3 and C(2,2) = 1, so 3/4 and 1/4."""
    a, b = [1, 2, 3, 4], [1, 2, 3, 5]
    candidates = torch.tensor([a, b, a, b, a])[:, None].expand(5, 40_000, 4)
    chosen = take(candidates, choose(candidates, 0.5, generator).index)
    is_a = (chosen == torch.tensor(a)).all(-1).double().mean()
    assert abs(is_a - 0.75) < 4 * (0.75 * 0.25 / 40_000) ** 0.5


def test_fallback_order_is_the_largest_count(generator):
    """Row 0 matches at order 3, row 1 only at 2 (C twice), row 2 nowhere: a plain draw."""
    rows = [[7, 7, 7, 1], [5, 5, 1, 2], [1, 2, 3, 4]]
    candidates = torch.tensor(rows).T[..., None]
    choice = choose(candidates, 1 / 3, generator)
    assert choice.order.tolist() == [3, 2, 1]
    assert choice.num_fallbacks(3) == 2
    assert take(candidates, choice.index)[:2, 0].tolist() == [7, 5]


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("vocab_size, patch_size", [(7, 2), (128_256, 4), (128_256, 8), (2**31, 3)])
def test_counts_of_distinct_patches(generator, vocab_size, patch_size, axes):
    """Whatever the order in memory, ``axes`` from the outermost in."""
    pool = torch.randint(vocab_size, (3, 6, patch_size), generator=generator)
    pool[:, 1] = pool[:, 0]
    pool[:, 1, -1] = (pool[:, 0, -1] + 1) % vocab_size
    pick = torch.randint(6, (50, 3), generator=generator)
    inverse = [axes.index(i) for i in range(3)]
    candidates = pool[torch.arange(3), pick].permute(axes).contiguous().permute(inverse)
    runs = distinct(candidates.numpy())
    start = 0
    for row, stop in enumerate(runs.per_row.cumsum().tolist()):
        got = {
            tuple(candidates[i, row].tolist()): int(c)
            for i, c in zip(runs.index[start:stop].tolist(), runs.count[start:stop], strict=True)
        }
        wanted: dict[tuple[int, ...], int] = {}
        for patch in candidates[:, row].tolist():
            wanted[tuple(patch)] = wanted.get(tuple(patch), 0) + 1
        assert got == wanted
        start = stop


def test_hash_collisions_are_found(generator, monkeypatch):
    """With a useless hash (all zero) the exact numbering takes over."""
    monkeypatch.setattr("calm_scale.sampling.batch._HASH", np.uint64(0))
    candidates = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4]])[:, None]
    runs = distinct(candidates.numpy())
    assert sorted(runs.count.tolist()) == [1, 2]


def test_weights_are_binomials_and_continue_them():
    table = np.exp(log_weights(6, exponent(1 / 3)))
    assert table[3].tolist() == pytest.approx([0, 0, 0, 1, 4, 10, 20])
    assert table[2].tolist() == pytest.approx([0, 0, 1, 3, 6, 10, 15])
    between = np.exp(log_weights(6, exponent(0.4)))[2]  # 1/T = 2.5
    assert between[:2].tolist() == [0, 0]
    assert (np.diff(between[2:]) > 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-9, 1e-300, 6e-309])
def test_tiny_temperatures_take_the_memory_of_the_orders_that_can_be_reached(generator, temperature):
    candidates = torch.tensor([[7, 7, 7, 1], [5, 5, 1, 2], [1, 2, 3, 4]]).T[..., None]
    choice = choose(candidates, temperature, generator)
    assert choice.order.tolist() == [3, 2, 1]
    assert take(candidates, choice.index)[:2, 0].tolist() == [7, 5]
    at = exponent(temperature)
    assert choice.num_fallbacks(at.n) == 3
    assert log_weights(4, at).shape == (5, 5)


def test_a_table_cut_at_n_is_the_whole_one():
    """Orders above N are never reached, and those below are the same numbers."""
    whole, cut = log_weights(6, exponent(1 / 6)), log_weights(6, exponent(0.11))
    assert whole.shape == cut.shape == (7, 7)
    assert (whole == cut).all()


def test_a_temperature_without_an_inverse_is_refused():
    with pytest.raises(SamplingError, match="5e-324 is so small that 1/T is infinite"):
        exponent(5e-324)
    assert issubclass(SamplingError, ConfigError)  # a mistake of the user: exit code 2


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_nothing_to_choose_from_is_refused(generator, shape):
    with pytest.raises(SamplingError, match="there is none to choose"):
        choose(torch.zeros(shape, dtype=torch.int64), 0.5, generator)


@pytest.mark.parametrize("temperature", [0.5, 0.4, 1 / 3])
def test_batch_bias_shrinks_with_candidates(law_model, generator, temperature):
    """Algorithm 2 is biased at small N and consistent: total variation falls below 1 % + noise at N = 400."""
    model = law_model(5, 1)
    wanted = sharpened(LAW, temperature)
    distances = []
    for num_candidates in (4, 400):
        num_rows = 20_000
        candidates = model.draw(LAW.expand(num_rows, 5), num_candidates, generator)
        chosen = take(candidates, choose(candidates, temperature, generator).index)[:, 0]
        law = chosen.bincount(minlength=5).double() / num_rows
        distances.append(float((law - wanted).abs().sum() / 2))
    assert distances[0] > 0.04
    assert distances[1] < 0.012


def test_tempered_model_reports_and_is_deterministic(law_model):
    model = law_model(5, 1)
    hidden = LAW.expand(3, 7, 5)
    texts = {}
    for algorithm in ("plain", "exact", "batch"):
        config = GenerationConfig(algorithm=algorithm, temperature=0.5, num_candidates=20)
        tempered = TemperedModel(model, algorithm, config)
        one = tempered.draw(hidden, 4, torch.Generator().manual_seed(3))
        assert one.shape == (4, 3, 7, 1)
        again = TemperedModel(model, algorithm, config).draw(hidden, 4, torch.Generator().manual_seed(3))
        assert torch.equal(one, again)
        assert not torch.equal(one, tempered.draw(hidden, 4, torch.Generator().manual_seed(4)))
        assert tempered.tally.num_patches == 2 * 84
        texts[algorithm] = tempered.sampler
    assert texts["plain"] == "plain, T = 1"
    assert "Algorithm 1" in texts["exact"]
    assert "N = 20" in texts["batch"]


def test_budget_below_one_round_is_refused(law_model):
    with pytest.raises(SamplingError, match="draw_budget 2"):
        TemperedModel(law_model(5, 1), "exact", GenerationConfig(temperature=0.2, draw_budget=2))


def test_the_budget_is_checked_without_a_model():
    tight = GenerationConfig(temperature=0.2, draw_budget=2)
    with pytest.raises(ConfigError, match="draw_budget 2 is below the 5 draws"):
        check_budget("exact", tight)
    check_budget("batch", tight)
    check_budget("exact", tight.model_copy(update={"temperature": 1.0}))
    check_budget("exact", tight.model_copy(update={"draw_budget": 5}))


def test_temperature_is_read_as_a_fraction():
    assert exponent(GenerationConfig(temperature="1/3").temperature).alpha == 0
    for wrong in ("1/0", "a/b", "3/2", "0/1", "1" + "0" * 400 + "/1"):
        with pytest.raises(ValueError, match="temperature"):
            GenerationConfig(temperature=wrong)


def test_draws_in_pieces_keep_their_rows_and_bound(law_model, generator, monkeypatch):
    """Rows with point laws: every piece's samples land in their own row, and no piece passes the limit."""
    monkeypatch.setattr("calm_scale.sampling.temperature._LOGITS", 24)
    model = law_model(3, 1)
    sizes = []
    whole = model.draw

    def draw(hidden, number, g):
        sizes.append(number * len(hidden) * 3)
        return whole(hidden, number, g)

    model.draw = draw
    rows = torch.eye(3).double()[[0, 1, 2, 1, 0]]
    for number in (3, 20):
        drawn = draw_rows(model, rows, number, generator)
        assert drawn[..., 0].tolist() == [[0, 1, 2, 1, 0]] * number
    assert max(sizes) <= 24


class StatedModel:
    """Lists the same five patches at each position: two of them twice."""

    patch_size, vocab_size, num_listed, device, shows = 2, 9, 7, torch.device("cpu"), "law"
    ids = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6], [7, 8], [3, 4], [8, 8]])
    weights = torch.tensor([0.1, 0.2, 0.15, 0.25, 0.05, 0.25, 0.0])

    def stated_law(self, hidden):
        return self.ids.expand(len(hidden), -1, -1), self.weights.expand(len(hidden), -1)


@pytest.mark.parametrize("temperature", [0.8, 0.5, 0.1])
def test_the_stated_law_is_tempered_over_decoded_patches(generator, temperature):
    """Against a dictionary of patches, and χ² of the draws; equal patches are added up before the power."""
    model, masses = StatedModel(), {}
    for patch, weight in zip(model.ids.tolist(), model.weights.tolist(), strict=True):
        masses[tuple(patch)] = masses.get(tuple(patch), 0.0) + weight
    want = sharpened(torch.tensor(list(masses.values())), temperature)
    law = tempered_law(model.ids[None], model.weights[None], temperature)[0]
    for patch, mass in zip(masses, want.tolist(), strict=True):
        is_patch = (model.ids == torch.tensor(patch)).all(-1)
        assert law[is_patch].sum().item() == pytest.approx(mass, rel=1e-6)
        assert (law[is_patch] > 0).sum() <= 1
    settings = GenerationConfig(algorithm="law", temperature=temperature)
    drawn = TemperedModel(model, "law", settings).draw(torch.zeros(300, 1), 20, generator)
    assert drawn.shape == (20, 300, 2)
    seen = [(drawn == torch.tensor(patch)).all(-1).sum().item() for patch in masses]
    likely = want * sum(seen) > 5
    assert sum(seen) == 6000
    observed = torch.tensor(seen)[likely]
    assert chi_squared_p(observed, want[likely] / want[likely].sum()) > 1e-3


def test_the_law_of_a_model_that_states_none_is_refused(law_model):
    with pytest.raises(SamplingError, match="atoms"):
        TemperedModel(law_model(5, 1), "law", GenerationConfig(temperature=0.5))
