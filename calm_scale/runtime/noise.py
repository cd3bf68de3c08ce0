"""Keyed noise: random numbers that belong to a position of a sample, not to a rank.

Every number is a function of (run seed, namespace, step, name, sample id, position). A rank that owns some
positions of some samples draws exactly the numbers that any other layout would have drawn for them; recompute
replays them, evaluation (its own namespace) does not disturb them, and torch's global generator is never touched.

Positions are drawn in aligned blocks of ``BLOCK``: one generator seeding (about a microsecond) buys the noise of
a whole block, and a rank draws only the blocks it owns a part of. The numbers are a property of the device type:
CPU and CUDA generators differ.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from calm_scale.runtime.host_copies import sent

BLOCK = 16
Namespace = Literal["train", "eval"]
_Fill = Callable[[torch.Tensor, torch.Generator], object]


def stream_seed(*key: int | str) -> int:
    """A 64-bit seed from a key of integers and strings; distinct keys give independent streams."""
    digest = hashlib.blake2b(digest_size=8)
    for part in key:
        raw = part.encode() if isinstance(part, str) else struct.pack("<q", part)
        digest.update(struct.pack("<B?", len(raw), isinstance(part, str)) + raw)
    seed: int = struct.unpack("<q", digest.digest())[0]
    return seed


@dataclass(frozen=True)
class _Span:
    """Rows of the flattened [B·p] grid that fall into one block of one sample."""

    sample: int
    block: int
    offset: int
    rows: slice[int, int, None]

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


class PositionNoise:
    """The noise of B samples at p positions each.

    Args:
        seed: the run's seed.
        step: training step (or any integer that names the evaluation pass).
        sample_ids: B identities of the sequences in the global sample stream; independent of the layout.
        positions: absolute positions [a, b) this rank computes, the same for all B samples.
        namespace: ``eval`` streams never meet ``train`` streams.
        device: where the numbers are wanted.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        sample_ids: torch.Tensor | Sequence[int],
        positions: range,
        *,
        namespace: Namespace = "train",
        device: torch.device | str = "cpu",
    ) -> None:
        ids = sample_ids.tolist() if isinstance(sample_ids, torch.Tensor) else list(sample_ids)
        if positions.step != 1 or positions.start < 0:
            raise ValueError(f"positions must be a contiguous range from 0 up, got {positions}")
        self.device = torch.device(device)
        self.sample_ids: list[int] = ids
        self.positions = positions
        self._key = (namespace, seed, step)
        self._generator = torch.Generator(self.device)
        self._spans = list(_spans(ids, positions))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, p)."""
        return len(self.sample_ids), len(self.positions)

    def uniform(self, name: str, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """U[low, high) of shape [B, p, *shape], fp32."""
        rows = self._draw(self._spans, name, shape, lambda out, g: out.uniform_(low, high, generator=g))
        return rows.view(*self.shape, *shape)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """N(0, 1) of shape [B, p, *shape], fp32."""
        return self._draw(self._spans, name, shape, _fill_normal).view(*self.shape, *shape)

    def chunks(self, max_rows: int) -> Iterator[NoiseChunk]:
        """Walk the flattened [B·p] rows in order, about ``max_rows`` at a time (at least one block).

        The numbers do not depend on ``max_rows``: it only bounds how many are alive at once.
        """
        pending: list[_Span] = []
        for span in self._spans:
            if pending and span.rows.stop - pending[0].rows.start > max_rows:
                yield NoiseChunk(self, pending)
                pending = []
            pending.append(span)
        if pending:
            yield NoiseChunk(self, pending)

    def row_keys(self, name: str) -> torch.Tensor:
        """A 63-bit key for every position, int64 [B, p]: seeds for counter-based generators inside kernels."""
        base = stream_seed(*self._key, name)
        samples = [stream_seed(base, sample) for sample in self.sample_ids]
        first = sent(torch.tensor(samples, dtype=torch.int64), self.device)[:, None]
        position = torch.arange(self.positions.start, self.positions.stop, device=self.device)[None, :]
        return _mix(first ^ _mix(position))

    def _draw(self, spans: Sequence[_Span], name: str, shape: tuple[int, ...], fill: _Fill) -> torch.Tensor:
        start = spans[0].rows.start if spans else 0
        num_rows = spans[-1].rows.stop - start if spans else 0
        out = torch.empty(num_rows, *shape, dtype=torch.float32, device=self.device)
        for span in spans:
            self._generator.manual_seed(stream_seed(*self._key, name, span.sample, span.block))
            target = out[span.rows.start - start : span.rows.stop - start]
            if span.length == BLOCK:
                fill(target, self._generator)
            else:
                whole = torch.empty(BLOCK, *shape, dtype=torch.float32, device=self.device)
                fill(whole, self._generator)
                target.copy_(whole[span.offset : span.offset + span.length])
        return out


class NoiseChunk:
    """Some consecutive rows of the flattened [B·p] grid: ``rows`` is their slice."""

    def __init__(self, noise: PositionNoise, spans: Sequence[_Span]) -> None:
        self._noise = noise
        self._spans = spans
        self.rows = slice(spans[0].rows.start, spans[-1].rows.stop)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """N(0, 1) of shape [rows, *shape], fp32: the same numbers as ``PositionNoise.normal(name, *shape)``."""
        return self._noise._draw(self._spans, name, shape, _fill_normal)


def _fill_normal(out: torch.Tensor, generator: torch.Generator) -> object:
    return out.normal_(generator=generator)


def _spans(sample_ids: Sequence[int], positions: range) -> Iterator[_Span]:
    row = 0
    for sample in sample_ids:
        start = positions.start
        while start < positions.stop:
            block = start // BLOCK
            stop = min(positions.stop, (block + 1) * BLOCK)
            yield _Span(sample, block, start - block * BLOCK, slice(row, row + stop - start))
            row += stop - start
            start = stop


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 63-bit scrambler (two xor-shift-multiply rounds); int64 arithmetic wraps."""
    mask = (1 << 63) - 1
    x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x14D049BB133111EB & mask
    return x ^ (x >> 31)


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
