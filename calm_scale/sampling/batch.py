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

from calm_scale.config.errors import ConfigError
from calm_scale.runtime.noise import Randomness, uniform

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_HASH = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying by it is a bijection of 64-bit words
_MOST = 2**62  # above any number of candidates
Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
Words: TypeAlias = "NDArray[np.uint64]"


class SamplingError(ConfigError):
    """A temperature or candidate count that no algorithm here can serve."""


class PromptError(SamplingError):
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
        SamplingError: not 0 < T ≤ 1 (there is no likelihood-free algorithm above 1), or 1/T is no finite number.
    """
    if not 0 < temperature <= 1:
        raise SamplingError(f"temperature must lie in (0, 1], got {temperature}")
    inverse = 1 / temperature
    if inverse == float("inf"):
        raise SamplingError(f"temperature {temperature} is so small that 1/T is infinite; use 1e-300 or more")
    n = int(inverse + 1e-9)
    alpha = inverse - n
    return Exponent(n, 0.0 if alpha < 1e-9 * inverse else alpha)


@dataclass(frozen=True)
class BatchChoice:
    """One choice a row: ``index [R]`` among the N candidates, ``order [R]`` ≤ n the order it was matched at."""

    index: Tensor
    order: Tensor

    def fell_back(self, n: int) -> Tensor:
        """bool ``[R]`` rows that had to use a lower order than n, which may be beyond 64 bits."""
        return self.order < min(n, _MOST)

    def num_fallbacks(self, n: int) -> int:
        """How many rows fell back."""
        return int(self.fell_back(n).sum())


@dataclass(frozen=True)
class Runs:
    """Distinct patches of every row, rows one after another: U of them in all, int64.

    Attributes:
        count: ``[U]`` how often each occurs among its row's N candidates.
        index: ``[U]`` one candidate (of N) that is this patch.
        per_row: ``[R]`` distinct patches in each row, at least one.
    """

    count: Ints
    index: Ints
    per_row: Ints


def distinct(candidates: Ints) -> Runs:
    """Counts the distinct patches in each row of ids ``[N, R, K]`` (below 2^31) with one sort over all rows."""
    num_candidates, num_rows, _ = candidates.shape
    words = _words(candidates)
    code = words[0] * _HASH
    for word in words[1:]:
        code += word
        code *= _HASH
    place, last, exact = _sorted_runs(code, words)
    if not exact:  # two patches shared a hash: number the patches instead
        _, number = np.unique(np.stack(words, -1).reshape(-1, len(words)), axis=0, return_inverse=True)
        shift = np.uint64(code.size.bit_length())
        place, last, _ = _sorted_runs(number.reshape(code.shape).astype(np.uint64) << shift, words)
    end = np.flatnonzero(last)
    count = end.copy()
    count[1:] -= end[:-1]
    count[0] += 1
    return Runs(count, place.take(end) % num_candidates, last.reshape(num_rows, num_candidates).sum(1))


def _words(candidates: Ints) -> list[Words]:
    """Patches as ⌈K/2⌉ arrays ``[R, N]`` of 64-bit words, two ids each: all equal exactly where the patches are."""
    k = candidates.shape[-1]
    ids = candidates.astype(np.int32)  # keeps the order of memory: both [N, R, K] and [R, N, K] are fast
    if k % 2 or ids.strides[-1] != ids.itemsize:
        ids = np.pad(np.ascontiguousarray(ids), ((0, 0), (0, 0), (0, k % 2)))
    pairs = ids.view(np.uint64)
    return [np.ascontiguousarray(pairs[..., i].T) for i in range(pairs.shape[-1])]


def _sorted_runs(code: Words, words: list[Words]) -> tuple[Ints, NDArray[np.bool_], bool]:
    """Sorts the rows of codes ``[R, N]`` in place: which of the R·N candidates stands at each place, which places
    end a run, and whether that is exact. The lowest bits of a code give way to the candidate's number: a plain
    sort is cheaper than argsort.
    """
    bits = np.uint64((code.size - 1).bit_length())
    code >>= bits
    code <<= bits
    code |= np.arange(code.size, dtype=np.uint64).reshape(code.shape)
    code.sort(axis=1)
    ordered = code.ravel()
    place = (ordered & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    ordered >>= bits
    last = np.empty(code.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=last[:-1])
    last[code.shape[1] - 1 :: code.shape[1]] = True
    unlike = np.zeros(code.size - 1, dtype=bool)
    for word in words:
        aligned = word.take(place)
        unlike |= aligned[1:] != aligned[:-1]
    return place, last, not bool((unlike > last[:-1]).any())


@lru_cache(maxsize=16)
def log_weights(num_candidates: int, at: Exponent) -> Floats:
    """Table ``[min(n, N)+1, N+1]``: log weight of a patch seen c times when matched at order m (row 0 unused).

    Row n is log C(c, n+α); rows m < n, the fall-backs, are log C(c, m). −∞ where c < m. No order above N is reached.
    """
    c = torch.arange(num_candidates + 1, dtype=torch.float64)
    order = torch.arange(min(at.n, num_candidates) + 1, dtype=torch.float64)[:, None]
    x = order.clone()
    x[at.n :] = at.value
    table = torch.lgamma(c + 1) - torch.lgamma((c - x + 1).clamp(min=1e-300)) - torch.lgamma(x + 1)
    return table.masked_fill(c < order.clamp(min=1), float("-inf")).numpy()


def choose(
    candidates: Tensor, temperature: float, generator: Randomness, allowed: Tensor | None = None
) -> BatchChoice:
    """Algorithm 2 on ids ``[N, R, K]``: one candidate for every row.

    Counting is a sort of N·R small numbers, which NumPy does on the CPU faster than a chain of small GPU kernels
    would be launched; the text needs the ids there anyway.

    Args:
        candidates: N independent draws for each of R rows.
        temperature: T in (0, 1].
        generator: the only source of randomness.
        allowed: bool ``[N, R]``, a property of the patch; candidates to choose among, at least one a row.

    Raises:
        SamplingError: N, R or K is 0, or a temperature without an algorithm (``exponent``).
    """
    at = exponent(temperature)
    num_candidates, num_rows, _ = candidates.shape
    if not candidates.numel():
        raise SamplingError(f"candidates are {list(candidates.shape)} [N, R, K]; there is none to choose")
    runs = distinct(candidates.cpu().numpy())
    count, per_row, stop = runs.count, runs.per_row, runs.per_row.cumsum()
    if allowed is not None:
        count = count * allowed.cpu().numpy()[runs.index, np.repeat(np.arange(num_rows), per_row)]
    most = np.maximum.reduceat(count, stop - per_row)
    order = np.minimum(most, min(at.n, num_candidates))
    table = log_weights(num_candidates, at)
    log_weight = table[order.repeat(per_row), count]
    log_weight -= table[order, most].repeat(per_row)
    reached = np.exp(log_weight, out=log_weight).cumsum()
    top = reached[stop - 1]
    bottom = np.concatenate([[0.0], top[:-1]])
    u = uniform((num_rows,), generator, torch.float64).cpu().numpy()
    mark = np.minimum(bottom + u * (top - bottom), np.nextafter(top, bottom))
    index = runs.index[np.searchsorted(reached, mark, side="right")]
    return BatchChoice(*(torch.from_numpy(a).to(candidates.device) for a in (index, order)))


def take(candidates: Tensor, index: Tensor) -> Tensor:
    """``candidates[index[r], r]``: ids ``[R, K]``."""
    return candidates[index, torch.arange(len(index), device=candidates.device)]
