"""Algorithm 2: low temperature from one batch of candidates, vectorised over rows.

Of N candidates, a patch seen c times gets weight C(c, n) at T = 1/n; where no patch is seen n times the order
falls back to n − 1, …, 1. For 1/T = n + α with 0 < α < 1 the weight is the binomial coefficient continued by
gamma functions, C(c, n+α) = Γ(c+1) / (Γ(c−n−α+1) Γ(n+α+1)) for c ≥ n: it equals the paper's at α = 0, and since
C(Np, x) / N^x → p^x / Γ(x+1) it is consistent for P^{1/T}/Z as N → ∞. Both are biased at finite N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from calm_scale.config.base import CalmScaleError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_HASH = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying by it is a bijection of 64-bit words
Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
Words: TypeAlias = "NDArray[np.uint64]"


class SamplingError(CalmScaleError):
    """A temperature or candidate count that no algorithm here can serve."""


class PromptError(SamplingError, ConfigError):
    """A prompt that this model cannot continue as asked."""


@dataclass(frozen=True)
class Exponent:
    """1/T = n + α with n = ⌊1/T⌋; an 1/T within 1e-9 of an integer is that integer (T = 1/3 is n = 3)."""

    n: int
    alpha: float

    @property
    def value(self) -> float:
        """1/T."""
        return self.n + self.alpha


def exponent(temperature: float) -> Exponent:
    """Splits 1/T.

    Raises:
        SamplingError: not 0 < T ≤ 1 (there is no likelihood-free algorithm above 1).
    """
    if not 0 < temperature <= 1:
        raise SamplingError(f"temperature must lie in (0, 1], got {temperature}")
    inverse = 1 / temperature
    n = int(inverse + 1e-9)
    alpha = inverse - n
    return Exponent(n, 0.0 if alpha < 1e-9 * inverse else alpha)


@dataclass(frozen=True)
class BatchChoice:
    """One choice a row: ``index [R]`` among the N candidates, ``order [R]`` ≤ n the order it was matched at."""

    index: Tensor
    order: Tensor

    def num_fallbacks(self, n: int) -> int:
        """Rows that had to use a lower order than n."""
        return int((self.order < n).sum())


@dataclass(frozen=True)
class Runs:
    """Distinct patches of every row, rows one after another: U of them in all, int64.

    Attributes:
        count: ``[U]`` how often each occurs among its row's N candidates.
        index: ``[U]`` one candidate (of N) that is this patch.
        stop: ``[R]`` one past each row's last run.
    """

    count: Ints
    index: Ints
    stop: Ints

    @property
    def per_row(self) -> Ints:
        """``[R]`` distinct patches in each row."""
        return np.diff(self.stop, prepend=0)


def distinct(candidates: Ints) -> Runs:
    """Counts the distinct patches in each row of ids ``[N, R, K]`` (below 2^31) with one sort over all rows."""
    num_candidates, num_rows, _ = candidates.shape
    words = _words(candidates)
    code = words[0] * _HASH
    for word in words[1:]:
        code = (code + word) * _HASH
    position, last, exact = _sorted_runs(code, words)
    if not exact:  # two patches shared a hash: number the patches instead
        _, number = np.unique(np.stack(words, -1).reshape(-1, len(words)), axis=0, return_inverse=True)
        shift = np.uint64(num_candidates.bit_length())
        position, last, _ = _sorted_runs(number.reshape(code.shape).astype(np.uint64) << shift, words)
    end = np.flatnonzero(last)
    count = end.copy()
    count[1:] -= end[:-1]
    count[0] += 1
    stop = np.searchsorted(end, num_candidates * np.arange(1, num_rows + 1) - 1) + 1
    return Runs(count, position.take(end), stop)


def _words(candidates: Ints) -> list[Words]:
    """Patches as ⌈K/2⌉ arrays ``[R, N]`` of 64-bit words, two ids each: all equal exactly where the patches are."""
    num_candidates, num_rows, k = candidates.shape
    pairs = np.zeros((-(-k // 2), num_rows, num_candidates, 2), dtype=np.int32)
    for i in range(k):
        pairs[i // 2, :, :, i % 2] = candidates[..., i].T
    return list(pairs.view(np.uint64)[..., 0])


def _sorted_runs(code: Words, words: list[Words]) -> tuple[Ints, NDArray[np.bool_], bool]:
    """Sorts rows by code: the candidate at each place, flat ``[R·N]``, which places end a run, and whether that
    is exact. The lowest bits of a code give way to the candidate's number: a plain sort is cheaper than argsort.
    """
    num_rows, num_candidates = code.shape
    bits = np.uint64((num_candidates - 1).bit_length())
    ordered = np.sort((code >> bits << bits) | np.arange(num_candidates, dtype=np.uint64), axis=1).ravel()
    position = (ordered & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    ordered >>= bits
    last = np.empty(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=last[:-1])
    last[num_candidates - 1 :: num_candidates] = True
    place = (position.reshape(code.shape) + num_candidates * np.arange(num_rows)[:, None]).ravel()
    unlike = np.zeros(len(ordered) - 1, dtype=bool)
    for word in words:
        aligned = word.take(place)
        unlike |= aligned[1:] != aligned[:-1]
    return position, last, not bool((unlike & ~last[:-1]).any())


@lru_cache(maxsize=16)
def log_weights(num_candidates: int, at: Exponent) -> Floats:
    """Table ``[n+1, N+1]``: log weight of a patch seen c times when matched at order m (row 0 unused).

    Row n is log C(c, n+α); rows m < n, the fall-backs, are log C(c, m). −∞ where c < m.
    """
    c = torch.arange(num_candidates + 1, dtype=torch.float64)
    order = torch.arange(at.n + 1, dtype=torch.float64)[:, None]
    x = order.clone()
    x[at.n] = at.value
    table = torch.lgamma(c + 1) - torch.lgamma((c - x + 1).clamp(min=1e-300)) - torch.lgamma(x + 1)
    return table.masked_fill(c < order.clamp(min=1), float("-inf")).numpy()


def choose(
    candidates: Tensor, temperature: float, generator: torch.Generator, allowed: Tensor | None = None
) -> BatchChoice:
    """Algorithm 2 on ids ``[N, R, K]``: one candidate for every row.

    Counting is a sort of N·R small numbers, which NumPy does on the CPU faster than a chain of small GPU kernels
    would be launched; the text needs the ids there anyway.

    Args:
        candidates: N independent draws for each of R rows.
        temperature: T in (0, 1].
        generator: the only source of randomness.
        allowed: bool ``[N, R]``, a property of the patch; candidates to choose among, at least one a row.
    """
    at = exponent(temperature)
    num_candidates, num_rows, _ = candidates.shape
    runs = distinct(candidates.cpu().numpy())
    count, per_row = runs.count, runs.per_row
    if allowed is not None:
        count = count * allowed.cpu().numpy()[runs.index, np.repeat(np.arange(num_rows), per_row)]
    most = np.maximum.reduceat(count, runs.stop - per_row)
    order = np.minimum(most, at.n)
    table = log_weights(num_candidates, at)
    weight = np.exp(table[np.repeat(order, per_row), count] - np.repeat(table[order, most], per_row))
    reached = weight.cumsum()
    top = reached[runs.stop - 1]
    bottom = np.concatenate([[0.0], top[:-1]])
    u = torch.rand(num_rows, dtype=torch.float64, device=generator.device, generator=generator).cpu().numpy()
    mark = np.minimum(bottom + u * (top - bottom), np.nextafter(top, bottom))
    index = runs.index[np.searchsorted(reached, mark, side="right")]
    return BatchChoice(*(torch.from_numpy(a).to(candidates.device) for a in (index, order)))


def take(candidates: Tensor, index: Tensor) -> Tensor:
    """``candidates[index[r], r]``: ids ``[R, K]``."""
    return candidates[index, torch.arange(len(index), device=candidates.device)]
