"""One rank, two ranks, and evaluation twice in a row: the same digits. A rank that fails stops all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


def said_by(world_size, **extra):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), **extra}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ranks_program.py"))],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_one_and_two_ranks_give_the_same_digits_twice():
    (alone,) = said_by(1)
    both = said_by(2)
    assert alone[0] == alone[1] == both[0][0] == both[0][1] == both[1][0]
    assert alone[0]["score"]["num_documents"] > 5


def test_a_failure_on_one_rank_stops_both_with_its_message():
    first, second = said_by(2, FAIL_RANK="1")
    assert "rank 1 failed" in first
    assert "token id 2" in first
    assert "token id 2" in second
