"""One rank, two ranks, and evaluation twice in a row: the same digits. A rank that fails stops all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


@pytest.fixture
def said_by(run_ranks):
    def said(world_size, **extra):
        ended = run_ranks(Path(__file__).with_name("ranks_program.py"), num_ranks=world_size, **extra)
        for code, _, errors in ended:
            assert code == 0, errors[-3000:]
        return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]

    return said


def test_one_and_two_ranks_give_the_same_digits_twice(said_by):
    (alone,) = said_by(1)
    both = said_by(2)
    assert alone[0] == alone[1] == both[0][0] == both[0][1] == both[1][0]
    assert alone[0]["score"]["num_documents"] > 5


def test_a_failure_on_one_rank_stops_both_with_its_message(said_by):
    first, second = said_by(2, FAIL_RANK="1")
    assert "rank 1 failed" in first
    assert "token id 2" in first
    assert "token id 2" in second
