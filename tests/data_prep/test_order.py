"""SampleOrder is a bijection of every epoch, needs no memory, and depends on nothing but the seed."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import ShardError
from data_prep.shards.order import MixtureOrder, SampleOrder


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**20))
def test_every_epoch_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    order = SampleOrder(n, seed)
    samples = order(np.arange(n, dtype=np.int64) + epoch * n)
    np.testing.assert_array_equal(np.sort(samples), np.arange(n))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 10**12), start=st.integers(0, 10**13))
def test_scalars_and_arrays_agree_and_stay_in_range(n: int, start: int) -> None:
    order = SampleOrder(n, 7)
    positions = np.arange(start, start + 5)
    samples = order(positions)
    assert [order(int(p)) for p in positions] == samples.tolist()
    assert samples.min() >= 0
    assert samples.max() < n


def test_epochs_and_seeds_give_different_orders_that_look_random() -> None:
    n = 4096
    a, b = SampleOrder(n, 0)(np.arange(2 * n)).reshape(2, n)
    c = SampleOrder(n, 1)(np.arange(n))
    for left, right in ((a, b), (a, c), (a, np.arange(n))):
        assert (left == right).mean() < 0.01
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.06
    steps = np.bincount(np.clip((a[1:] - a[:-1]) % n * 8 // n, 0, 7), minlength=8)
    assert steps.min() > 0.8 * n / 8


def test_a_billion_samples_need_no_memory_and_no_time() -> None:
    tracemalloc.start()
    begin = time.perf_counter()
    order = SampleOrder(10**9, 3)
    first = order(np.arange(2048))
    seconds = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(first)) == 2048
    assert peak < 1_000_000
    assert seconds < 0.5  # generous: the benchmark measures it


def test_the_order_is_fixed_for_ever() -> None:
    assert SampleOrder(1000, 5)(np.arange(6)).tolist() == GOLDEN


GOLDEN = [644, 969, 443, 260, 280, 129]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 3.0, 0.5], [0.1, 7.0, 2.5]])
def test_mixture_shares_are_exact_to_one_sample_after_every_epoch(weights: list[float]) -> None:
    counts = [700, 250, 90]
    n = sum(counts)
    stream = MixtureOrder(counts, weights, 11)(np.arange(5 * n))
    edges = np.concatenate([[0, *np.cumsum(counts)]])
    shares = np.multiply(counts, weights) / np.dot(counts, weights)
    for epochs in range(1, 6):
        seen = np.histogram(stream[: epochs * n], edges)[0]
        assert np.abs(seen - epochs * n * shares).max() <= 1.0
    for s, count in enumerate(counts):
        mine = stream[(stream >= edges[s]) & (stream < edges[s + 1])]
        for lap in range(len(mine) // count):
            assert len(np.unique(mine[lap * count : (lap + 1) * count])) >= count * 0.3
        repeats = np.bincount(mine - edges[s], minlength=count)
        assert repeats.max() - repeats.min() <= 1 + len(mine) // count


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SampleOrder(0, 0)
    with pytest.raises(ValueError, match="start at 0"):
        SampleOrder(5, 0)(-1)
    with pytest.raises(ShardError, match="below one sample", check=lambda error: error.exit_code == 2):
        MixtureOrder([1000, 1], [1.0, 0.0001], 0)
