"""BrierLM and generation settings (method §3–4)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calm_scale.config.base import Section


class EvaluationConfig(Section):
    """Protocol of a BrierLM evaluation; it is part of the reported result."""

    split: Literal["heldout", "train"] = "heldout"
    max_sequences: int | None = Field(default=None, gt=0)
    num_samples: int = Field(default=2, ge=2)
    coverage: Literal["first", "all"] = "first"
    batch_size: int = Field(default=8, gt=0)
    bootstrap: int = Field(default=1000, ge=100)
    seed: int = 0


class GenerationConfig(Section):
    """Likelihood-free temperature sampling: Algorithm 1 (exact) or 2 (batch of candidates)."""

    algorithm: Literal["plain", "exact", "batch"] = "batch"
    temperature: float = Field(default=0.5, gt=0, le=1)
    num_candidates: int = Field(default=200, ge=1)
    draw_budget: int = Field(default=10_000, ge=1)
    max_new_tokens: int = Field(default=128, gt=0)
    seed: int = 0
