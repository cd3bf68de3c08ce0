"""Which document a scored position belongs to, and the sums of sequences merged into sums of documents.

A document begins at a BOS token. A sequence that does not start with one continues the last document of the
sequence before it, so ids are settled after all ranks' sequences have come together. A data set without any
BOS has no visible boundaries: each of its sequences then counts as a document.
"""

from __future__ import annotations

from bisect import bisect_left
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
    from calm_scale.evaluation.sequences import TokenBlocks

DocumentsBy = Literal["bos", "sequence"]


@dataclass(frozen=True)
class SequenceCounts:
    """Integer sums of one sequence by segment: row s holds what lies after its s-th BOS. ``int64 [num_bos+1, 4]``.

    ``detached``: a document began between the sequence scored before this one and this one's first token.
    ``draws``: patches, model draws and fall-backs that a tempered model counted for it; None from any other.
    """

    index: int
    num_bos: int
    detached: bool
    hits: NDArray[np.int64]
    pairs: NDArray[np.int64]
    positions: NDArray[np.int64]
    draws: tuple[int, int, int] | None = None


def segments(tokens: Tensor, bos_id: int | None) -> Tensor:
    """int64 ``[L]``: how many BOS tokens stand at or before each token of ``[L]``."""
    if bos_id is None:
        return torch.zeros_like(tokens)
    return (tokens == bos_id).cumsum(0)


def bos_between(dataset: TokenBlocks, indices: Sequence[int], index: int, bos_id: int | None) -> bool:
    """Whether a BOS stands in the sequences left out between ``index`` and the selected one before it."""
    place = bisect_left(indices, index)
    if bos_id is None or place == 0:
        return False
    return any(bool((dataset[i] == bos_id).any()) for i in range(indices[place - 1] + 1, index))


def count_sequence(
    index: int, tokens: Tensor, shifted: Sequence[tuple[int, Windows]], bos_id: int | None, detached: bool
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
    return SequenceCounts(index, num_bos, detached, hits, pairs, positions)


def document_rows(sequences: Sequence[SequenceCounts]) -> tuple[list[int], DocumentsBy]:
    """First document row of each of the sequences, given in order, and how documents were told apart."""
    if not any(s.num_bos or s.detached for s in sequences):
        return list(range(len(sequences))), "sequence"
    rows = []
    last = 0
    for s in sequences:
        rows.append(last + int(s.detached))
        last = rows[-1] + s.num_bos
    return rows, "bos"


def merge(sequences: Sequence[SequenceCounts], num_samples: int) -> tuple[Counts, DocumentsBy]:
    """Sums per document from sequences in any order, named by their place among all documents of the sequences.

    Documents without a scored position are dropped; which ones these are depends on the model's patches.
    """
    ordered = sorted(sequences, key=lambda s: s.index)
    first, by = document_rows(ordered)
    num_rows = max((row + s.num_bos + 1 for row, s in zip(first, ordered, strict=True)), default=0)
    sums = np.zeros((3, num_rows, ORDERS), dtype=np.int64)
    for row, sequence in zip(first, ordered, strict=True):
        here = slice(row, row + sequence.num_bos + 1)
        for kind, values in enumerate((sequence.hits, sequence.pairs, sequence.positions)):
            sums[kind, here] += values
    scored = np.flatnonzero(sums[2, :, 0] > 0)
    hits, pairs, positions = sums
    return Counts(hits, pairs, positions, num_samples, np.arange(num_rows)).rows(scored), by
