"""Where samplers take random numbers from: one generator for all rows, or a stream for each row.

With a stream for each row, what a row draws does not depend on the rows beside it, their number or their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class RowStreams:
    """R generators, one for each row of a batch. A generator may serve several rows, one after another."""

    generators: tuple[torch.Generator, ...]

    @classmethod
    def seeded(cls, seeds: Iterable[int], device: torch.device) -> RowStreams:
        """One stream for each seed."""
        return cls(tuple(torch.Generator(device).manual_seed(seed) for seed in seeds))

    @property
    def device(self) -> torch.device:
        """Where the numbers are drawn."""
        return self.generators[0].device


Randomness: TypeAlias = torch.Generator | RowStreams
"""What a sampler draws from."""


def of_rows(source: Randomness, rows: torch.Tensor | Sequence[int] | range) -> Randomness:
    """The source for a selection of rows (row numbers); one generator serves any rows."""
    if isinstance(source, torch.Generator):
        return source
    numbers = rows.tolist() if isinstance(rows, torch.Tensor) else rows
    return RowStreams(tuple(source.generators[row] for row in numbers))


def uniform(shape: Sequence[int], source: Randomness, dtype: torch.dtype | None = None) -> torch.Tensor:
    """U[0, 1) of ``shape``, whose first dimension is the rows."""
    if isinstance(source, torch.Generator):
        return torch.rand(tuple(shape), generator=source, device=source.device, dtype=dtype)
    parts = [
        torch.rand(tuple(shape[1:]), generator=g, device=g.device, dtype=dtype) for g in source.generators
    ]
    return torch.stack(parts)


def normal(shape: Sequence[int], source: Randomness) -> torch.Tensor:
    """N(0, 1) of ``shape``, whose first dimension is the rows."""
    if isinstance(source, torch.Generator):
        return torch.randn(tuple(shape), generator=source, device=source.device)
    return torch.stack(
        [torch.randn(tuple(shape[1:]), generator=g, device=g.device) for g in source.generators]
    )


def categorical(law: torch.Tensor, num_samples: int, source: Randomness) -> torch.Tensor:
    """Indices ``[R, num_samples]`` drawn with replacement from the laws ``[R, V]``."""
    if isinstance(source, torch.Generator):
        return torch.multinomial(law, num_samples, replacement=True, generator=source)
    drawn = [
        torch.multinomial(row, num_samples, replacement=True, generator=g)
        for row, g in zip(law, source.generators, strict=True)
    ]
    return torch.stack(drawn)
