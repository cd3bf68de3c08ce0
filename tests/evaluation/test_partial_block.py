"""A prepared text is scored to its last token: as one long sequence cut at the same places would be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from calm_scale.config import RunConfig
from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.brier import EvaluationError
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.exact import evaluate_exact
from calm_scale.evaluation.report import table, to_document
from data_prep.prep import prepare
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer.definition import train_bpe


class OneOf:
    """Rank ``rank`` of two; the other's values are known."""

    def __init__(self, rank, others=None):
        self.rank, self.world_size, self.others = rank, 2, others or {}
        self.said = None

    def everywhere(self, work):
        value = self.said = work()
        return [value if r == self.rank else self.others.get(r, []) for r in range(2)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A held-out split of 64-token sequences whose last one is not full, read as blocks of 32."""
    folder = tmp_path_factory.mktemp("prepared")
    corpus = folder / "a.jsonl"
    texts = [f"{i} the patch and the token " * 3 for i in range(23)]
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train_bpe([corpus], 280, folder / "tokenizer.json")
    run = RunConfig.model_validate(
        {
            "name": "t",
            "workdir": str(folder),
            "vocab_size": 280,
            "prep": {
                "sources": [{"paths": [str(corpus)]}],
                "splits": {"heldout": 1.0},
                "sequence_length": 64,
            },
        }
    )
    prepare(run)
    return ShardDataset(run.data_dir / "heldout", 32, partial=True)


@pytest.fixture(scope="module")
def uniform():
    import torch

    return torch.full((280, 280), 1 / 280)


@pytest.mark.parametrize("patch_size", [1, 2, 4, 8])
def test_the_partial_block_is_scored(markov, prepared, uniform, patch_size):
    manifest = prepared.manifest
    model = markov(uniform, patch_size)
    config = EvaluationConfig(bootstrap=100)
    result = evaluate(model, prepared, config, bos_id=manifest.bos_id, pad_id=manifest.pad_id)
    lengths = [len(prepared[i]) for i in range(len(prepared))]
    assert 0 < lengths[-1] < 32
    assert sum(lengths) == manifest.tokens.text + manifest.tokens.bos
    expected = [
        sum(len(range(patch_size, length - n + 1, patch_size)) for length in lengths) for n in range(1, 5)
    ]
    assert list(result.score.num_positions) == expected
    protocol = result.protocol
    assert (protocol["dropped_tail_tokens"], protocol["partial_sequences"]) == (0, 1)
    assert protocol["block_tokens"] == 32
    assert table(result).row_count
    cut = [np.asarray(prepared[i]) for i in range(len(prepared))]
    same = evaluate(model, cut, config, bos_id=manifest.bos_id)
    assert same.counts.hits.tolist() == result.counts.hits.tolist()
    other = OneOf(1)
    evaluate(model, prepared, config, bos_id=manifest.bos_id, pad_id=manifest.pad_id, crew=other)
    crew = OneOf(0, {1: other.said})
    two = evaluate(model, prepared, config, bos_id=manifest.bos_id, pad_id=manifest.pad_id, crew=crew)
    assert to_document(two)["score"] == to_document(result)["score"]
    if patch_size == 1:
        assert evaluate_exact(model, prepared, config).num_positions[0] == sum(lengths) - len(lengths)


@pytest.mark.parametrize("patch_size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_block_shorter_than_a_patch_is_context_only(markov, chain, patch_size, length):
    model = markov(chain, patch_size)
    sequences = [np.array([0, 1] * 16), np.array([0, 1, 0, 1, 0][:length])]
    result = evaluate(model, sequences, EvaluationConfig(bootstrap=100, coverage="all"))
    alone = evaluate(model, sequences[:1], EvaluationConfig(bootstrap=100, coverage="all"))
    extra = sum(len(range(patch_size, length - s, patch_size)) for s in range(patch_size))
    assert result.score.num_positions[0] == alone.score.num_positions[0] + extra


def test_an_evaluation_without_a_position_fails(markov, chain):
    with pytest.raises(EvaluationError, match="nothing was scored: none of 1 sequences"):
        evaluate(markov(chain, 4), [np.array([0, 1, 0, 1])], EvaluationConfig(bootstrap=100))
