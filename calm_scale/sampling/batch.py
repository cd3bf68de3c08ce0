"""Algorithm 2: low temperature from one batch of candidates, vectorised over rows.

Of N candidates, a patch seen c times gets weight C(c, n) at T = 1/n; where no patch is seen n times the order
falls back to n − 1, …, 1. For 1/T = n + α with 0 < α < 1 the weight is the binomial coefficient continued by
gamma functions, C(c, n+α) = Γ(c+1) / (Γ(c−n−α+1) Γ(n+α+1)) for c ≥ n: it equals the paper's at α = 0, and since
C(Np, x) / N^x → p^x / Γ(x+1) it is consistent for P^{1/T}/Z as N → ∞. Both are biased at finite N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from calm_scale.config.base import CalmScaleError

if TYPE_CHECKING:
    from torch import Tensor

_INT64 = 2**63 - 1
_HASH = 0x9E3779B97F4A7C15  # odd, so multiplication by its powers is a bijection of 64-bit words


class SamplingError(CalmScaleError):
    """A temperature or candidate count that no algorithm here can serve."""


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
    """Distinct patches of every row, rows one after another: U of them in all.

    Attributes:
        count: int64 ``[U]`` how often each occurs among its row's N candidates.
        index: int64 ``[U]`` one candidate (of N) that is this patch.
        row: int64 ``[U]``.
        stop: int64 ``[R]`` one past each row's last run.
    """

    count: Tensor
    index: Tensor
    row: Tensor
    stop: Tensor


def distinct(candidates: Tensor, vocab_size: int) -> Runs:
    """Counts the distinct patches of each row of ids ``[N, R, K]`` by one sort, no hashing by hand per row."""
    num_candidates = candidates.shape[0]
    ordered, position, differs = _ordered(candidates, vocab_size)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:, :-1] = differs
    end = last.view(-1).nonzero()[:, 0]  # a row's final candidate always ends a run, so runs never cross rows
    count = end.diff(prepend=end.new_tensor([-1]))
    return Runs(count, position.view(-1)[end], end // num_candidates, last.sum(1).cumsum(0))


def _ordered(candidates: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[R, N]`` sorted within rows, the candidate at each place, and where neighbours differ ``[R, N-1]``."""
    words = _words(candidates, vocab_size)
    code = words[0]
    for k, word in enumerate(words[1:], 1):
        code = code + word * (_HASH**k % 2**63)
    ordered, position = code.sort(dim=1)
    differs = ordered[:, 1:] != ordered[:, :-1]
    if len(words) == 1 or torch.equal(differs, _any_differs(words, position)):
        return ordered, position, differs
    # Two patches shared a hash (about once in 2^40 calls): number the patches exactly.
    patches = candidates.transpose(0, 1)
    _, code = patches.flatten(0, 1).unique(dim=0, return_inverse=True)
    ordered, position = code.view(patches.shape[:2]).sort(dim=1)
    return ordered, position, ordered[:, 1:] != ordered[:, :-1]


def _words(candidates: Tensor, vocab_size: int) -> list[Tensor]:
    """Exact int64 numbers ``[R, N]`` of as many tokens each as 63 bits hold; all equal means equal patches."""
    per_word = max(1, int(math.log(_INT64) / math.log(max(2, vocab_size))))
    words = []
    for begin in range(0, candidates.shape[-1], per_word):
        word = candidates[..., begin].T
        for k in range(begin + 1, min(begin + per_word, candidates.shape[-1])):
            word = torch.add(candidates[..., k].T, word, alpha=vocab_size)
        words.append(word.contiguous())
    return words


def _any_differs(words: list[Tensor], position: Tensor) -> Tensor:
    """Where neighbours in the given order differ in some word, bool ``[R, N-1]``."""
    out = torch.zeros_like(position[:, 1:], dtype=torch.bool)
    for word in words:
        aligned = word.gather(1, position)
        out |= aligned[:, 1:] != aligned[:, :-1]
    return out


@lru_cache(maxsize=16)
def log_weights(num_candidates: int, at: Exponent, device: torch.device | None = None) -> Tensor:
    """Table float64 ``[n+1, N+1]``: log weight of a patch seen c times when matched at order m (row 0 unused).

    Row n is log C(c, n+α); rows m < n, the fall-backs, are log C(c, m). −∞ where c < m.
    """
    c = torch.arange(num_candidates + 1, dtype=torch.float64, device=device)
    order = torch.arange(at.n + 1, dtype=torch.float64, device=device)[:, None]
    x = order.clone()
    x[at.n] = at.value
    table = torch.lgamma(c + 1) - torch.lgamma((c - x + 1).clamp(min=1e-300)) - torch.lgamma(x + 1)
    return table.masked_fill(c < order.clamp(min=1), float("-inf"))


def choose(
    candidates: Tensor,
    temperature: float,
    vocab_size: int,
    generator: torch.Generator,
    allowed: Tensor | None = None,
) -> BatchChoice:
    """Algorithm 2 on ids ``[N, R, K]``: one candidate for every row.

    Args:
        candidates: N independent draws for each of R rows.
        temperature: T in (0, 1].
        vocab_size: V; ids lie in [0, V).
        generator: the only source of randomness, on the candidates' device.
        allowed: bool ``[N, R]``, a property of the patch; candidates to choose among, at least one a row.
    """
    at = exponent(temperature)
    num_candidates, num_rows = candidates.shape[:2]
    runs = distinct(candidates, vocab_size)
    count = runs.count if allowed is None else runs.count * allowed[runs.index, runs.row]
    most = torch.zeros(num_rows, dtype=torch.int64, device=count.device).scatter_reduce_(
        0, runs.row, count, "amax"
    )
    order = most.clamp(max=at.n)
    table = log_weights(num_candidates, at, count.device)
    largest = table[order, most]
    weight = (table[order[runs.row], count] - largest[runs.row]).exp()
    reached = weight.cumsum(0)
    top = reached[runs.stop - 1]
    bottom = torch.cat([top.new_zeros(1), top[:-1]])
    u = torch.rand(num_rows, dtype=torch.float64, device=count.device, generator=generator)
    mark = torch.minimum(bottom + u * (top - bottom), torch.nextafter(top, bottom))
    return BatchChoice(runs.index[torch.searchsorted(reached, mark, right=True)], order)


def take(candidates: Tensor, index: Tensor) -> Tensor:
    """``candidates[index[r], r]``: ids ``[R, K]``."""
    return candidates[index, torch.arange(len(index), device=candidates.device)]
