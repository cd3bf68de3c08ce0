"""The protocol on laws with known scores: coverage at any K, and results that do not depend on the split."""

from __future__ import annotations

import numpy as np
import pytest

from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.brier import EvaluationError
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.report import load, save, table, to_document
from calm_scale.evaluation.sequences import Teams


class FakeCrew:
    """Runs as one of several ranks whose other ranks' values are already known."""

    def __init__(self, rank, world_size, others=None):
        self.rank, self.world_size, self.others = rank, world_size, others or {}
        self.said = None

    def everywhere(self, work, *, patience=None):
        value = self.said = work()
        return [value if r == self.rank else self.others.get(r, []) for r in range(self.world_size)]


@pytest.mark.parametrize("patch_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("coverage", ["first", "all"])
def test_components_match_the_exact_chain(markov, chain, patch_size, coverage):
    model = markov(chain, patch_size)
    sequences = model.sequences(12, 97)
    config = EvaluationConfig(num_samples=6, coverage=coverage, bootstrap=200, confidence=0.9999)
    result = evaluate(model, sequences, config)
    grids = [[s[o:] for s in sequences] for o in range(patch_size if coverage == "all" else 1)]
    sizes = [
        [sum(len(range(patch_size, len(s) - n + 1, patch_size)) for s in g) for g in grids]
        for n in range(1, 5)
    ]
    exact = [
        sum(model.exact_brier(g)[n] * size for g, size in zip(grids, sizes[n], strict=True)) / sum(sizes[n])
        for n in range(4)
    ]
    for n in range(4):
        assert result.score.num_positions[n] == sum(sizes[n])
        spread = (exact[n] * (1 - exact[n]) / sum(sizes[n])) ** 0.5 + 0.5 / sum(sizes[n]) ** 0.5
        assert abs(result.score.components[n] - exact[n]) < 2.5 * spread
    assert result.score.brierlm is not None


def test_paths_that_diverged_are_not_rolled_forward(markov, chain):
    """At K = 2 and S = 2 the extra forward rows are the wrong collisions only, far fewer than S a position."""
    model = markov(chain, 2)
    sequences = model.sequences(4, 200)
    evaluate(model, sequences, EvaluationConfig(num_samples=2, bootstrap=100))
    extra = model.num_hidden_rows - len(sequences)
    assert 0 < extra < 0.4 * 4 * 100


@pytest.mark.parametrize("patch_size", [2, 4])
def test_identical_for_any_batch_and_ranks(markov, chain, patch_size):
    model = markov(chain, patch_size)
    sequences = [*model.sequences(7, 64), model.sequences(1, 37, seed=5)[0]]
    whole = evaluate(model, sequences, EvaluationConfig(batch_size=1, bootstrap=100), bos_id=2)
    batched = evaluate(model, sequences, EvaluationConfig(batch_size=4, bootstrap=100), bos_id=2)
    other = FakeCrew(1, 2)
    evaluate(model, sequences, EvaluationConfig(bootstrap=100), bos_id=2, crew=other)
    two = evaluate(
        model, sequences, EvaluationConfig(bootstrap=100), bos_id=2, crew=FakeCrew(0, 2, {1: other.said})
    )
    for result in (batched, two):
        a, b = to_document(whole), to_document(result)
        assert {k: v for k, v in a.items() if k != "execution"} == {
            k: v for k, v in b.items() if k != "execution"
        }
    assert two.execution["ranks"] == 2


def test_teams_of_ranks_score_like_single_ranks(markov, chain):
    """Four ranks, two to a model: teams share the sequences and the first rank of each speaks."""
    model = markov(chain, 4)
    sequences, config = model.sequences(5, 64), EvaluationConfig(bootstrap=100)
    whole = evaluate(model, sequences, config)
    third = FakeCrew(2, 4)
    evaluate(model, sequences, config, crew=Teams(third, 2))
    fourth = FakeCrew(3, 4, {2: third.said})
    evaluate(model, sequences, config, crew=Teams(fourth, 2))
    assert len(third.said) == len(fourth.said) == 2
    others = {1: "another rank of the first team", 2: third.said, 3: fourth.said}
    split = evaluate(model, sequences, config, crew=Teams(FakeCrew(0, 4, others), 2))
    assert to_document(split)["score"] == to_document(whole)["score"]
    assert (split.execution["ranks"], split.execution["tensor_parallel"]) == (4, 2)
    model.vocab_size = 1
    with pytest.raises(
        EvaluationError, match="vocabulary has 1 ids"
    ):  # at once: its team may wait in a layer
        evaluate(model, sequences, config, crew=Teams(FakeCrew(0, 4), 2))


def test_documents_run_over_sequence_borders(markov, chain):
    model = markov(chain, 4)
    sequences = [np.array([2, *[0] * 31]), np.array([0] * 32), np.array([0] * 16 + [2] + [1] * 15)]
    result = evaluate(model, sequences, EvaluationConfig(bootstrap=100), bos_id=2)
    assert result.protocol["documents_by"] == "bos"
    assert result.score.num_documents == 2
    # Document 1: 7 + 7 boundaries, and 12 tokens' worth (3) of the third sequence before its BOS at 16.
    assert result.counts.positions[:, 0].tolist() == [7 + 7 + 3, 4]


def test_a_selection_is_spread_and_keeps_documents_apart(markov, chain):
    """Every third of nine sequences: 0, 3, 6. A BOS in a sequence left out separates its neighbours."""
    model = markov(chain, 4)
    sequences = [np.full(16, i % 2) for i in range(9)]
    sequences[1] = np.array([2] * 16)
    config = EvaluationConfig(bootstrap=100, max_sequences=3)
    result = evaluate(model, sequences, config, bos_id=2)
    assert (result.protocol["num_sequences"], result.protocol["sequences_left_out"]) == (3, 6)
    assert result.counts.positions[:, 0].tolist() == [3, 6]
    whole = evaluate(model, sequences[:1] + sequences[3:4] + sequences[6:7], config, bos_id=2)
    assert whole.protocol["documents_by"] == "sequence"


def test_partial_last_patch_and_padding_are_scored_as_far_as_they_go(markov, chain):
    model = markov(chain, 4)
    sequence = np.array([0, 1] * 7)  # 14 tokens: boundaries at 4, 8 and 12, the last with 2 tokens
    result = evaluate(model, [sequence], EvaluationConfig(bootstrap=100))
    assert result.score.num_positions == (3, 3, 2, 2)
    assert (result.protocol["dropped_tail_tokens"], result.protocol["sequences_left_out"]) == (0, 0)
    padded = np.array([0, 1, 0, 1, 0, 1, 0, 2])
    result = evaluate(model, [padded], EvaluationConfig(bootstrap=100), pad_id=2)
    assert result.score.num_positions == (1, 1, 1, 0)
    assert result.score.components[3] is None
    assert "Brier-4" in result.score.undefined_because


def test_ids_beyond_the_vocabulary_are_refused(markov, chain):
    model = markov(chain, 4)
    with pytest.raises(EvaluationError, match="token id 3"):
        evaluate(model, [np.array([0, 1, 2, 3] * 4)], EvaluationConfig(bootstrap=100))
    padded = markov(chain, 4)
    padded.draw = lambda hidden, n, g: markov(chain, 4).draw(hidden, n, g) + 2
    with pytest.raises(EvaluationError, match="padded rows"):
        evaluate(padded, model.sequences(1, 32), EvaluationConfig(bootstrap=100))


def test_json_round_trip_and_table(markov, chain, tmp_path):
    model = markov(chain, 4)
    result = evaluate(
        model, model.sequences(3, 64), EvaluationConfig(bootstrap=100), provenance={"autoencoder": "abc"}
    )
    save(result, tmp_path / "a" / "eval.json")
    again = load(tmp_path / "a" / "eval.json")
    assert again.score == result.score
    assert again.counts.hits.tolist() == result.counts.hits.tolist()
    assert table(result).row_count == 5
    with pytest.raises(EvaluationError, match="not a"):
        (tmp_path / "b.json").write_text("{}")
        load(tmp_path / "b.json")
