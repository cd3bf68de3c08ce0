"""A model split over two tensor-parallel ranks: the tokens and scores of one that is whole, on both ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
NAMES = ("softmax1", "energy2", "energy4")


@pytest.fixture(scope="module")
def reports():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("split_program.py"))],
            env={**base, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


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
