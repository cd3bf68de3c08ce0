"""Paired comparison and the baseline's exact scores."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.brier import EvaluationError, component_values
from calm_scale.evaluation.compare import compare, table
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.exact import evaluate_exact
from calm_scale.evaluation.report import NotAnEvaluationError, load, save


def blurred(chain, share):
    return (1 - share) * chain + share / len(chain)


def test_a_better_model_is_seen_and_its_twin_is_not(markov, chain):
    sequences = markov(chain, 4).sequences(60, 101)
    config = EvaluationConfig(bootstrap=200, num_samples=4)
    good = evaluate(markov(chain, 4), sequences, config)
    worse = evaluate(markov(blurred(chain, 0.4), 4), sequences, config)
    better = compare(worse, good)
    assert better.differences[0].interval[0] > 0
    assert better.differences[4].name == "BrierLM"
    assert better.differences[4].share_above > 0.99
    twin = compare(good, evaluate(markov(chain, 4), sequences, config.model_copy(update={"seed": 1})))
    low, high = twin.differences[0].interval
    assert low < 0 < high
    assert twin.protocol_differences == ("seed: a 0, b 1",)
    assert table(better).row_count == 5


def test_pairing_narrows_the_interval(markov, chain):
    """Documents of very different difficulty: the paired interval is narrower than the two apart would make it."""
    lazy = torch.tensor([[0.98, 0.01, 0.01], [0.1, 0.7, 0.2], [0.34, 0.33, 0.33]])
    sequences = [np.zeros(64, dtype=np.int64), np.full(64, 2)] * 20
    config = EvaluationConfig(bootstrap=400, num_samples=8)
    a = evaluate(markov(lazy, 4), sequences, config)
    b = evaluate(markov(blurred(lazy, 0.05), 4), sequences, config)
    paired = compare(a, b).differences[0].interval
    (low_a, high_a), (low_b, high_b) = a.score.component_intervals[0], b.score.component_intervals[0]
    assert paired[1] - paired[0] < 0.5 * ((high_a - low_a) ** 2 + (high_b - low_b) ** 2) ** 0.5


def test_other_documents_are_refused(markov, chain):
    config = EvaluationConfig(bootstrap=100)
    model = markov(chain, 4)
    a = evaluate(model, model.sequences(6, 40), config, provenance={"data": "x"})
    b = evaluate(model, model.sequences(5, 40), config, provenance={"data": "x"})
    with pytest.raises(EvaluationError, match="num_sequences: 6 and 5"):
        compare(a, b)
    c = evaluate(model, model.sequences(6, 40), config, provenance={"data": "y"})
    with pytest.raises(EvaluationError, match="different data"):
        compare(a, c)


def test_documents_pair_by_their_place_not_by_their_number(markov, chain):
    """Three documents of which K = 8 scores the first and the last, K = 2 all: the middle one is left out of both."""
    long = [0, 1] * 8
    sequences = [np.array([2, *long, 2, 0, 1, 2, *long])]
    config = EvaluationConfig(bootstrap=100)
    fine = evaluate(markov(chain, 2), sequences, config, bos_id=2)
    coarse = evaluate(markov(chain, 8), sequences, config, bos_id=2)
    assert (coarse.counts.ids.tolist(), fine.counts.ids.tolist()) == ([1, 3], [1, 2, 3])
    result = compare(coarse, fine)
    assert result.num_documents == coarse.counts.num_documents
    assert result.left_out == (0, fine.counts.num_documents - coarse.counts.num_documents)
    assert "scored in b only" in table(result).caption
    mine = np.isin(fine.counts.ids, coarse.counts.ids)
    shown = component_values(fine.counts.rows(np.flatnonzero(mine)).total())[0]
    assert [d.b for d in result.differences[:2]] == pytest.approx(list(shown[:2]))


def test_equal_numbers_of_other_documents_do_not_pair_up(markov, chain):
    """Both score two documents, one of them in common: the same number is not the same documents."""
    config = EvaluationConfig(bootstrap=100)
    model = markov(chain, 4)
    a = evaluate(model, model.sequences(4, 40), config)
    first, last = (replace(a, counts=a.counts.rows(np.array(r))) for r in ([0, 1, 2], [1, 2, 3]))
    result = compare(first, last)
    assert (result.num_documents, result.left_out) == (2, (1, 1))
    assert [d.difference for d in result.differences[:4]] == [0, 0, 0, 0]
    with pytest.raises(EvaluationError, match="at least 2 documents scored by both, there is 1"):
        compare(first, replace(a, counts=a.counts.rows(np.array([2, 3]))))


def test_other_blocks_are_refused_whatever_their_number(markov, chain):
    config = EvaluationConfig(bootstrap=100)
    model = markov(chain, 4)
    a, b = (evaluate(model, model.sequences(6, size), config, provenance={"data": "x"}) for size in (40, 80))
    with pytest.raises(EvaluationError, match="block_tokens: 40 and 80"):
        compare(a, b)


def test_pairing_survives_the_file_and_an_old_file_is_refused(markov, chain, tmp_path):
    config = EvaluationConfig(bootstrap=100)
    model = markov(chain, 4)
    result = evaluate(model, model.sequences(6, 40), config)
    save(result, tmp_path / "a.json")
    again = load(tmp_path / "a.json")
    assert compare(again, result).num_documents == 6
    raw = json.loads((tmp_path / "a.json").read_text())
    del raw["documents"]["ids"]
    (tmp_path / "old.json").write_text(json.dumps(raw))
    with pytest.raises(EvaluationError, match="second evaluation does not say which documents"):
        compare(result, load(tmp_path / "old.json"))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("documents", "num_samples"), "a", "num_samples is 'a'"),
        (("documents", "num_samples"), 0, "num_samples is 0"),
        (("documents", "num_samples"), 10**30, "beyond any evaluation"),
        (("documents", "hits", 0, 0), 1e30, "hits is not a list of counts, 4 a row"),
        (("documents", "hits", 0, 0), 10**30, "hits is not a list of counts"),
        (("documents", "hits", 0, 0), 10**6, "more than the samples"),
        (("documents", "pairs", 0, 0), -1, "pairs is not"),
        (("documents", "positions", 0), [1, 2], "is damaged"),
        (("documents", "hits"), [], "differ in length"),
        (("documents", "ids"), [5, 4, 3, 2, 1, 0], "do not ascend"),
        (("documents",), [], "documents is not an object"),
        (("protocol", "provenance"), [], "provenance is not an object"),
        (("protocol",), [], "protocol is not an object"),
    ],
)
def test_an_edited_file_is_damaged_not_a_traceback(markov, chain, tmp_path, place, value, words):
    model = markov(chain, 4)
    path = tmp_path / "a.json"
    save(evaluate(model, model.sequences(6, 40), EvaluationConfig(bootstrap=100)), path)
    raw = json.loads(path.read_text())
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(NotAnEvaluationError, match=words):
        load(path)


def test_other_sampling_steps_are_named(markov, chain):
    model = markov(chain, 4)
    config, sequences = EvaluationConfig(bootstrap=100), model.sequences(6, 40)
    a, b = (evaluate(model, sequences, config, provenance={"sampling_steps": n}) for n in ("4", "8"))
    assert compare(a, b).protocol_differences == ("sampling_steps: a 4, b 8",)
    assert compare(a, a).protocol_differences == ()


def test_exact_scores_of_a_known_chain(markov, chain):
    """Cross-entropy and Brier-1 equal the closed form to rounding, Brier-2..4 within the sampled prefixes' noise."""
    model = markov(chain, 1)
    sequences = model.sequences(8, 120)
    result = evaluate_exact(model, sequences, EvaluationConfig(num_samples=8))
    exact = model.exact_brier(sequences)
    nats = [-float(chain.double()[a, b].log()) for s in sequences for a, b in pairwise(s)]
    assert result.cross_entropy == pytest.approx(np.mean(nats), rel=1e-12)
    assert result.components[0] == pytest.approx(exact[0], rel=1e-12)
    assert result.components == pytest.approx(exact, abs=0.01)
    assert result.num_positions == (8 * 119, 8 * 118, 8 * 117, 8 * 116)
    sampled = evaluate(model, sequences, EvaluationConfig(num_samples=8, bootstrap=100)).score
    assert sampled.num_positions == result.num_positions
    assert sampled.components == pytest.approx(exact, abs=0.05)
    batched = evaluate_exact(model, sequences, EvaluationConfig(num_samples=8, batch_size=1))
    assert batched == result


def test_exact_scores_need_probabilities(markov, categorical, chain):
    with pytest.raises(EvaluationError, match="K = 4"):
        evaluate_exact(markov(chain, 4), [np.zeros(8)], EvaluationConfig())
