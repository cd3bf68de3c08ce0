"""Algorithm 1: exact temperature sampling from draws alone, for every 0 < T ≤ 1, vectorised over rows.

With 1/T = n + α: draw n patches; unless all equal some x*, start again. If α > 0, for i = 1, 2, …: draw; equal to
x* accepts; otherwise start again with probability α/i. A round accepts x with probability P(x)^n · P(x)^α, so the
output has law P^{1/T} / Z. Expected draws (Theorem 2): (n + 1[α>0] Σ_x P(x)^{1/T−1}) / Z.

All rows advance together. A model call gives every unfinished row a block of fresh draws; a row uses them in
order until it changes state (candidate found, accepted, rejected) and throws the rest of its block away, which
leaves the law untouched because the unused draws were not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calm_scale.runtime.noise import Randomness, of_rows, uniform
from calm_scale.sampling.batch import Exponent, choose, exponent, take

if TYPE_CHECKING:
    from torch import Tensor

Draw = Callable[["Tensor", int], "Tensor"]
"""(row indices [r], number) → fresh independent ids [number, r, K]."""


@dataclass(frozen=True)
class ExactSample:
    """Result of Algorithm 1 for R rows.

    Attributes:
        patches: ids ``[R, K]``.
        used: int64 ``[R]`` draws the algorithm looked at (what Theorem 2 counts), the fall-back's not among them.
        made: draws made in all, with those thrown away at the end of a block and those of fall-backs.
        fell_back: bool ``[R]`` rows that ran out of budget and were filled by Algorithm 2: not exact.
    """

    patches: Tensor
    used: Tensor
    made: int
    fell_back: Tensor


def sample_exact(
    draw: Draw,
    num_rows: int,
    temperature: float,
    generator: Randomness,
    *,
    budget: int,
    fallback_candidates: int = 200,
    max_block: int = 64,
) -> ExactSample:
    """One patch of law P_r^{1/T}/Z for each row r.

    Args:
        draw: fresh draws from the rows' laws.
        num_rows: R.
        temperature: T in (0, 1]; T = 1 is one plain draw.
        generator: uniforms of the Bernoulli factory and of the fall-back.
        budget: most draws a row may use; then it falls back to Algorithm 2 on ``fallback_candidates`` fresh ones.
        max_block: most draws a row is given at once.
    """
    at = exponent(temperature)
    everyone = torch.arange(num_rows, device=generator.device)
    if at.value == 1:
        patches = draw(everyone, 1)[0]
        ones = torch.ones_like(everyone)
        return ExactSample(patches, ones, num_rows, torch.zeros_like(ones, dtype=torch.bool))
    state = _State(at, everyone, budget, generator)
    block = at.n
    while len(active := state.unfinished()):
        sizes = (budget - state.used[active]).clamp(max=min(block, max_block)) // at.n * at.n
        sizes = sizes.clamp(min=at.n)
        for size in sizes.unique().tolist():  # near the budget the rows' blocks differ
            rows = active[sizes == size]
            state.feed(rows, draw(rows, size))
        block *= 2
    rest = state.exhausted.nonzero()[:, 0]
    if len(rest):
        candidates = draw(rest, fallback_candidates)
        state.made += fallback_candidates * len(rest)
        chosen = choose(candidates, temperature, of_rows(generator, rest))
        state.put(rest, take(candidates, chosen.index))
    return ExactSample(state.patches, state.used, state.made, state.exhausted)


class _State:
    """Where every row stands: looking for a candidate (factory = 0) or at factory step i."""

    def __init__(self, at: Exponent, everyone: Tensor, budget: int, generator: Randomness) -> None:
        self.at, self.budget, self.generator = at, budget, generator
        self.used = torch.zeros_like(everyone)
        self.factory = torch.zeros_like(everyone)
        self.accepted = torch.zeros_like(everyone, dtype=torch.bool)
        self.exhausted = torch.zeros_like(everyone, dtype=torch.bool)
        self.patches = everyone.new_empty(len(everyone), 0)
        self.made = 0

    def unfinished(self) -> Tensor:
        return (~self.accepted & ~self.exhausted).nonzero()[:, 0]

    def put(self, rows: Tensor, patches: Tensor) -> None:
        if self.patches.shape[1] == 0:
            self.patches = patches.new_zeros(len(self.used), patches.shape[1])
        self.patches[rows] = patches

    def feed(self, rows: Tensor, drawn: Tensor) -> None:
        """Lets rows ``[r]`` use ``drawn [D, r, K]``, D a multiple of n."""
        self.made += drawn.shape[0] * len(rows)
        in_factory = self.factory[rows] > 0
        for part, step in ((~in_factory, self._search), (in_factory, self._run_factory)):
            if bool(part.any()):
                step(rows[part], drawn[:, part])
        self.exhausted |= ~self.accepted & (self.used + self.at.n > self.budget)

    def _search(self, rows: Tensor, drawn: Tensor) -> None:
        """Stage 1: the first of D/n attempts whose n draws are all equal."""
        tries = drawn.unflatten(0, (-1, self.at.n))
        success = (tries == tries[:, :1]).all(-1).all(1)  # [A, r]
        found, first = success.any(0), success.long().argmax(0)
        self.used[rows] += torch.where(found, (first + 1) * self.at.n, drawn.shape[0])
        lucky = rows[found]
        if len(lucky):
            self.put(lucky, tries[first[found], 0, found.nonzero()[:, 0]])
        if self.at.alpha:
            self.factory[lucky] = 1
        else:
            self.accepted[lucky] = True

    def _run_factory(self, rows: Tensor, drawn: Tensor) -> None:
        """Stage 2: accept at the first match, start again at the first rejection, whichever comes first."""
        size = drawn.shape[0]
        i = self.factory[rows] + torch.arange(size, device=rows.device)[:, None]
        match = (drawn == self.patches[rows]).all(-1)  # [D, r]
        u = uniform((len(rows), size), of_rows(self.generator, rows), torch.float64).T
        ends = match | (u < self.at.alpha / i)
        ended, first = ends.any(0), ends.long().argmax(0)
        self.used[rows] += torch.where(ended, first + 1, size)
        self.accepted[rows] = ended & match.gather(0, first[None])[0]
        self.factory[rows] = torch.where(ended, 0, self.factory[rows] + size)


def expected_draws(law: Tensor, temperature: float) -> float:
    """Theorem 2 for a known law ``[X]`` (probabilities): expected draws of Algorithm 1 per patch."""
    at = exponent(temperature)
    p = law[law > 0].double()
    z = float((p**at.value).sum())
    factory = float((p ** (at.value - 1)).sum()) if at.alpha else 0.0
    return 1.0 if at.value == 1 else (at.n + factory) / z
