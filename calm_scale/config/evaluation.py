"""BrierLM and generation settings (method §3–4)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from calm_scale.config.base import Section, Seed

Temperature = Annotated[float, Field(gt=0, le=1)]


class EvaluationConfig(Section):
    """Protocol of a BrierLM evaluation; it is part of the reported result.

    ``coverage: first`` scores the tokens that follow each patch boundary of the sequence's own grid; ``all``
    repeats the pass on the K shifted grids, so every token offset is once the first after a true prefix.
    ``max_sequences`` scores that many, evenly spaced over the split.
    ``exact_batches`` runs one sequence per forward pass, which makes the scores identical to the last digit
    for every ``batch_size``; without it ``batch_size`` sequences share a pass and a tie may fall otherwise.
    ``tensor_parallel`` ranks hold one model, where it is too large for one device.
    ``text`` names the text of the split, such as ``wikitext-103``; reports show the scores of different texts apart.
    """

    split: Literal["heldout", "train"] = "heldout"
    text: str | None = None
    max_sequences: int | None = Field(default=None, gt=0)
    num_samples: int = Field(default=2, ge=2)
    coverage: Literal["first", "all"] = "first"
    temperature: Temperature = 1.0
    algorithm: Literal["exact", "batch"] = "batch"
    num_candidates: int = Field(default=200, ge=1)
    draw_budget: int = Field(default=10_000, ge=1)
    batch_size: int = Field(default=8, gt=0)
    exact_batches: bool = True
    tensor_parallel: int = Field(default=1, ge=1)
    bootstrap: int = Field(default=1000, ge=100)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    seed: Seed = 0


class GenerationConfig(Section):
    """Likelihood-free temperature sampling: Algorithm 1 (exact) or 2 (batch of candidates).

    ``num_candidates`` is N of Algorithm 2 and the number of draws tried for a prompt that ends inside a patch;
    ``draw_budget`` bounds Algorithm 1 per patch, after which it falls back to Algorithm 2 and says so.
    ``temperature`` may be written as a fraction, ``1/3``.
    """

    algorithm: Literal["plain", "exact", "batch"] = "batch"
    temperature: Temperature = 0.5
    num_candidates: int = Field(default=200, ge=1)
    draw_budget: int = Field(default=10_000, ge=1)
    max_new_tokens: int = Field(default=128, gt=0)
    stop: tuple[str, ...] = ()
    batch_size: int = Field(default=16, gt=0)
    seed: Seed = 0
