"""Which document a scored position belongs to, and the sums of sequences merged into sums of documents.

A document begins at a BOS token. A sequence that does not start with one continues the last document of the
sequence before it, so ids are settled after all ranks' sequences have come together. A data set without any
BOS has no visible boundaries: each of its sequences then counts as a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calm_scale.evaluation.brier import ORDERS, Counts, match_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from calm_scale.evaluation.paths import Windows

DocumentsBy = Literal["bos", "sequence"]


@dataclass(frozen=True)
class SequenceCounts:
    """Integer sums of one sequence by segment: row s holds what lies after its s-th BOS. ``int64 [num_bos+1, 4]``."""

    index: int
    num_bos: int
    hits: NDArray[np.int64]
    pairs: NDArray[np.int64]
    positions: NDArray[np.int64]


def segments(tokens: Tensor, bos_id: int | None) -> Tensor:
    """int64 ``[L]``: how many BOS tokens stand at or before each token of ``[L]``."""
    if bos_id is None:
        return torch.zeros_like(tokens)
    return (tokens == bos_id).cumsum(0)


def count_sequence(
    index: int, tokens: Tensor, shifted: Sequence[tuple[int, Windows]], bos_id: int | None
) -> SequenceCounts:
    """Sums of one sequence ``[L]`` over its grids, given as (shift, windows)."""
    segment = segments(tokens, bos_id)
    num_bos = int(segment[-1]) if len(segment) else 0
    sums = torch.zeros(3, num_bos + 1, ORDERS, dtype=torch.int64, device=tokens.device)
    for shift, windows in shifted:
        counted = match_counts(windows.samples[:, None], windows.truth[None], windows.valid[None])
        of_window = segment[windows.start + shift]
        for kind, values in enumerate(counted):
            sums[kind].index_add_(0, of_window, values[:, 0].T.contiguous())
    hits, pairs, positions = sums.cpu().numpy()
    return SequenceCounts(index, num_bos, hits, pairs, positions)


def document_rows(num_bos: Sequence[int]) -> tuple[list[int], DocumentsBy]:
    """First document row of each sequence, in sequence order, and how documents were told apart."""
    if not any(num_bos):
        return list(range(len(num_bos))), "sequence"
    before = np.concatenate([[0], np.cumsum(num_bos)[:-1]])
    return [int(row) for row in before], "bos"


def merge(sequences: Sequence[SequenceCounts], num_samples: int) -> tuple[Counts, DocumentsBy]:
    """Sums per document from sequences in any order; documents without a scored position are dropped."""
    ordered = sorted(sequences, key=lambda s: s.index)
    first, by = document_rows([s.num_bos for s in ordered])
    num_rows = max((row + s.num_bos + 1 for row, s in zip(first, ordered, strict=True)), default=0)
    sums = np.zeros((3, num_rows, ORDERS), dtype=np.int64)
    for row, sequence in zip(first, ordered, strict=True):
        here = slice(row, row + sequence.num_bos + 1)
        for kind, values in enumerate((sequence.hits, sequence.pairs, sequence.positions)):
            sums[kind, here] += values
    hits, pairs, positions = sums[:, sums[2, :, 0] > 0]
    return Counts(hits, pairs, positions, num_samples), by
