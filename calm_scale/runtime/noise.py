"""Keyed noise: random numbers that belong to a position of a sample, not to a rank.

Every number is a function of (run seed, namespace, step, name, sample id, position). A rank that owns some
positions of some samples draws exactly the numbers that any other layout would have drawn for them; recompute
replays them, evaluation (its own namespace) does not disturb them, and torch's global generator is never touched.

On a CPU positions are drawn in aligned blocks of ``BLOCK``: one generator seeding (about a microsecond) buys the noise
of a whole block, and a rank draws only the blocks it owns a part of. On a GPU with Triton one kernel draws all rows,
each from a key of its own (``noise_triton``); without it, blocks as on a CPU. The numbers are a property of the type of
device.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from calm_scale.runtime import fast_kernels
from calm_scale.runtime.host_copies import sent

BLOCK = 16
Namespace = Literal["train", "eval"]
_Bounds: TypeAlias = tuple[float, float] | None
"""Of uniform numbers; None: they are normal."""


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
        self._in_one_launch = self.device.type == "cuda" and fast_kernels.found().triton

    @property
    def shape(self) -> tuple[int, int]:
        """(B, p)."""
        return len(self.sample_ids), len(self.positions)

    @property
    def _rows(self) -> slice[int, int, None]:
        return slice(0, len(self.sample_ids) * len(self.positions))

    def _spans(self, rows: slice[int, int, None]) -> Iterator[_Span]:
        """The parts of blocks that these rows of the flattened grid are, in order."""
        row = rows.start
        while row < rows.stop:
            sample, place = divmod(row, len(self.positions))
            start = self.positions.start + place
            block = start // BLOCK
            stop = min(self.positions.stop, (block + 1) * BLOCK, start + rows.stop - row)
            yield _Span(self.sample_ids[sample], block, start - block * BLOCK, slice(row, row + stop - start))
            row += stop - start

    def uniform(self, name: str, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """U[low, high) of shape [B, p, *shape], fp32."""
        return self._draw(self._rows, name, shape, (low, high)).view(*self.shape, *shape)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """N(0, 1) of shape [B, p, *shape], fp32."""
        return self._draw(self._rows, name, shape).view(*self.shape, *shape)

    def chunks(self, max_rows: int) -> Iterator[NoiseChunk]:
        """Walk the flattened [B·p] rows in order, about ``max_rows`` at a time (at least one block).

        The numbers do not depend on ``max_rows``: it only bounds how many are alive at once.
        """
        pending: list[_Span] = []
        for span in self._spans(self._rows):
            if pending and span.rows.stop - pending[0].rows.start > max_rows:
                yield NoiseChunk(self, _rows_of(pending))
                pending = []
            pending.append(span)
        if pending:
            yield NoiseChunk(self, _rows_of(pending))

    def row_keys(self, name: str) -> torch.Tensor:
        """A 63-bit key for every position, int64 [B, p]: seeds for counter-based generators inside kernels."""
        position = torch.arange(self.positions.start, self.positions.stop, device=self.device)[None, :]
        return _mix(self._sample_keys(name)[:, None] ^ _mix(position))

    def _sample_keys(self, name: str) -> torch.Tensor:
        """The key of every sample's stream, int64 [B] on the device."""
        base = stream_seed(*self._key, name)
        keys = torch.tensor([stream_seed(base, sample) for sample in self.sample_ids], dtype=torch.int64)
        return sent(keys, self.device)

    def _draw(
        self, rows: slice[int, int, None], name: str, shape: tuple[int, ...], bounds: _Bounds = None
    ) -> torch.Tensor:
        """[rows, *shape] of the flattened grid."""
        if self._in_one_launch:
            from calm_scale.runtime.noise_triton import draw_rows

            drawn = draw_rows(self._sample_keys(name), self.positions, rows, math.prod(shape), bounds=bounds)
            return drawn.view(-1, *shape)
        out = torch.empty(rows.stop - rows.start, *shape, dtype=torch.float32, device=self.device)
        for span in self._spans(rows):
            self._draw_block(span, name, out[span.rows.start - rows.start :][: span.length], bounds)
        return out

    def _draw_block(self, span: _Span, name: str, target: torch.Tensor, bounds: _Bounds) -> None:
        self._generator.manual_seed(stream_seed(*self._key, name, span.sample, span.block))
        if span.length == BLOCK:
            _fill(target, self._generator, bounds)
            return
        whole = torch.empty(BLOCK, *target.shape[1:], dtype=torch.float32, device=self.device)
        _fill(whole, self._generator, bounds)
        target.copy_(whole[span.offset : span.offset + span.length])


class NoiseChunk:
    """Some consecutive rows of the flattened [B·p] grid: ``rows`` is their slice."""

    def __init__(self, noise: PositionNoise, rows: slice[int, int, None]) -> None:
        self._noise = noise
        self.rows = rows

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """N(0, 1) of shape [rows, *shape], fp32: the same numbers as ``PositionNoise.normal(name, *shape)``."""
        return self._noise._draw(self.rows, name, shape)


def _rows_of(spans: Sequence[_Span]) -> slice[int, int, None]:
    return slice(spans[0].rows.start, spans[-1].rows.stop)


def _fill(out: torch.Tensor, generator: torch.Generator, bounds: _Bounds) -> None:
    if bounds is None:
        out.normal_(generator=generator)
    else:
        out.uniform_(*bounds, generator=generator)


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
