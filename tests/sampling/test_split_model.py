"""A model split over two tensor-parallel ranks: the tokens and scores of one that is whole, on both ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
NAMES = ("softmax1", "energy2", "energy4")


@pytest.fixture(scope="module")
def reports(run_ranks):
    ended = run_ranks(Path(__file__).with_name("split_program.py"), timeout=200)
    for code, _, errors in ended:
        assert code == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["plain", "batch", "exact"])
def test_two_ranks_draw_the_tokens_of_one(reports, name, algorithm):
    whole = reports[0][name]["1"][algorithm]
    assert len({token for ids in whole[:-1] for token in ids}) > 5
    assert [report[name]["2"][algorithm] for report in reports] == [whole, whole]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_find_the_scores_of_one(reports, name):
    whole, first, second = (
        report[name][tensor]["score"] for report, tensor in zip(reports * 2, "122", strict=False)
    )
    assert first["documents"] == second["documents"] == whole["documents"]
    assert (first["execution"]["ranks"], first["execution"]["tensor_parallel"]) == (2, 2)


def test_each_rank_keeps_its_share_of_the_cache(reports):
    assert [reports[0]["energy4"][tensor]["groups"] for tensor in "12"] == [4, 2]
