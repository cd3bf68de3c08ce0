"""The order of samples: a stateless permutation of each epoch, exact and O(1) in memory.

Epoch e of ``num_samples`` n samples is a keyed bijection of [0, n): a balanced Feistel network over the
smallest even-bit domain 2^b ≥ n, applied again to values that fall outside [0, n) ("cycle walking"). The key
is (seed, e), so the order depends on nothing else: not on world size, layout or workers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import overload

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import ShardError

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    state = _mix((seed + 0x9E3779B97F4A7C15) & _MASK64) ^ _mix((epoch * 0xD1342543DE82EF95 + 1) & _MASK64)
    return [np.uint64(_mix((state + (r + 1) * 0x9E3779B97F4A7C15) & _MASK64)) for r in range(_ROUNDS)]


def permute(positions: NDArray[np.uint64], num_samples: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Images of ``positions`` [n] ⊂ [0, num_samples) under the bijection of (seed, epoch); uint64 [n]."""
    if num_samples == 1:
        return np.zeros_like(positions)
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = _round_keys(seed, epoch)
    images = _feistel(positions, keys, shift, mask)
    outside = np.flatnonzero(images >= num_samples)
    while outside.size:
        images[outside] = _feistel(images[outside], keys, shift, mask)
        outside = outside[images[outside] >= num_samples]
    return images


def _feistel(
    values: NDArray[np.uint64], keys: list[np.uint64], shift: np.uint64, mask: np.uint64
) -> NDArray[np.uint64]:
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << shift) | right


def _distinct(epochs: NDArray[np.int64]) -> list[int]:
    """The epochs a batch touches; nearly always one."""
    if not epochs.size:
        return []
    first, last = int(epochs.min()), int(epochs.max())
    return [first] if first == last else [int(e) for e in np.unique(epochs)]


class SampleOrder:
    """Index of the sample at each position of the infinite stream of epochs.

    ``order(i)`` is the sample at stream position i (epoch i // n, a fresh permutation each epoch); an array
    of positions gives an int64 array of the same shape. Holds no state but n and the seed.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one sample, got {num_samples}")
        self.num_samples, self.seed = num_samples, seed

    @overload
    def __call__(self, stream_index: int) -> int: ...
    @overload
    def __call__(self, stream_index: NDArray[np.integer]) -> NDArray[np.int64]: ...
    def __call__(self, stream_index: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        """Sample index in [0, num_samples) for each stream position ≥ 0."""
        index = np.asarray(stream_index)
        if index.size and int(index.min()) < 0:
            raise ValueError(f"stream positions start at 0, got {int(index.min())}")
        flat = index.reshape(-1).astype(np.int64)
        epochs, positions = np.divmod(flat, self.num_samples)
        samples = np.empty(flat.shape, np.int64)
        for epoch in _distinct(epochs):
            here = epochs == epoch
            samples[here] = permute(
                positions[here].astype(np.uint64), self.num_samples, self.seed, int(epoch)
            )
        return int(samples[0]) if index.ndim == 0 else samples.reshape(index.shape)


class MixtureOrder:
    """The same stream over several sources whose shares are set by weights instead of by their sizes.

    Sources lie one after the other: source s holds samples [start_s, start_s + counts_s). In every epoch of
    ``num_samples`` = Σ counts positions, source s appears with share p_s ∝ counts_s · weights_s; after any
    number of whole epochs its total is within one sample of epochs · num_samples · p_s. Inside a source each
    sample comes once before any comes again.
    """

    def __init__(self, counts: list[int], weights: list[float], seed: int) -> None:
        if not counts or len(counts) != len(weights) or min(counts) < 1 or min(weights) <= 0:
            raise ValueError("a mixture needs one positive weight and at least one sample per source")
        self.num_samples, self.seed = sum(counts), seed
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        shares = [
            Fraction(c) * Fraction(w).limit_denominator(10**6) for c, w in zip(counts, weights, strict=True)
        ]
        total = sum(shares)
        if min(shares) * self.num_samples < total:
            raise ShardError(
                "a source's share of the mixture is below one sample an epoch; raise its weight or drop it",
                mistake=True,
            )
        self._edges = [sum(shares[:s], Fraction(0)) / total for s in range(len(shares) + 1)]
        self._orders = [SampleOrder(c, seed + 1 + s) for s, c in enumerate(counts)]

    def _before(self, epoch: int) -> list[int]:
        """Positions up to the start of ``epoch`` that lie below each edge of the cumulated shares."""
        return [int(edge * epoch * self.num_samples) for edge in self._edges]

    @overload
    def __call__(self, stream_index: int) -> int: ...
    @overload
    def __call__(self, stream_index: NDArray[np.integer]) -> NDArray[np.int64]: ...
    def __call__(self, stream_index: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        """Sample index in [0, num_samples) for each stream position ≥ 0."""
        index = np.asarray(stream_index)
        flat = index.reshape(-1).astype(np.int64)
        epochs, positions = np.divmod(flat, self.num_samples)
        samples = np.empty(flat.shape, np.int64)
        for epoch in _distinct(epochs):
            here = np.flatnonzero(epochs == epoch)
            slots = permute(positions[here].astype(np.uint64), self.num_samples, self.seed, int(epoch))
            samples[here] = self._of_slots(slots.astype(np.int64), int(epoch))
        return int(samples[0]) if index.ndim == 0 else samples.reshape(index.shape)

    def _of_slots(self, slots: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Slots of one epoch are dealt to the sources in order; a source's n-th slot is its n-th sample."""
        before, after = self._before(epoch), self._before(epoch + 1)
        drawn = [before[s + 1] - before[s] for s in range(len(self._orders))]
        quotas = [after[s + 1] - after[s] - drawn[s] for s in range(len(self._orders))]
        bounds = np.concatenate([[0], np.cumsum(quotas)])
        samples = np.empty(slots.shape, np.int64)
        for s, order in enumerate(self._orders):
            mine = (slots >= bounds[s]) & (slots < bounds[s + 1])
            if mine.any():
                samples[mine] = self._starts[s] + order(slots[mine] - bounds[s] + drawn[s])
        return samples
