"""The sequences of an evaluation, dealt to ranks, with the teacher-forced states of each of their grids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from calm_scale.evaluation.brier import ORDERS, Counts, EvaluationError, match_counts
from launchers.ranks import Beat, Ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from calm_scale.config.evaluation import EvaluationConfig
    from calm_scale.evaluation.paths import Windows
    from calm_scale.lm.patch_model import PatchModel

T = TypeVar("T")


class TokenBlocks(Protocol):
    """Tokenized sequences: ``ShardDataset``, or any list of 1-D integer arrays (the last may be shorter)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[Any]: ...


class Teams(Ranks):
    """Ranks in teams of ``tensor`` consecutive ones, each team with one model split over it: ``rank`` counts teams.

    All ranks of a team score the same sequences and find the same numbers; its first rank's are gathered. An error is
    raised at once on its own rank alone: the others of its team may wait for it inside a layer and could not be told.
    """

    def __init__(self, ranks: Ranks, tensor: int) -> None:
        super().__init__(ranks.rank // tensor, ranks.world_size // tensor)
        self._ranks, self.tensor = ranks, tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """One value a team."""
        return self._ranks.gather_objects(value)[:: self.tensor]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of team ``source``'s first rank."""
        return self._ranks.broadcast_object(value, source * self.tensor)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks."""
        return self._ranks.maximum(values)

    def everywhere(self, work: Callable[[], T], *, patience: Beat | None = None) -> list[T]:
        """One result a team, on every rank."""
        mine = work()
        return self._ranks.everywhere(lambda: mine, patience=patience)[:: self.tensor]


@dataclass(frozen=True)
class Grid:
    """One patch grid of a sequence: its tokens from ``shift`` on ``[L − shift]`` and their states ``[P, d]``."""

    shift: int
    tokens: Tensor
    hidden: Tensor


def grids(
    model: PatchModel, dataset: TokenBlocks, indices: Sequence[int], config: EvaluationConfig
) -> Iterator[tuple[int, Tensor, list[Grid]]]:
    """Yields (sequence index, tokens ``[L]``, its grids) for the given sequences, in order."""
    shifts = range(model.patch_size) if config.coverage == "all" else range(1)
    for begin in range(0, len(indices), config.batch_size):
        batch = indices[begin : begin + config.batch_size]
        tokens = [torch.from_numpy(np.asarray(dataset[i]).astype(np.int64)).to(model.device) for i in batch]
        for index, sequence in zip(batch, tokens, strict=True):
            _check_ids(index, sequence, model.vocab_size)
        per_shift = [_states(model, [t[shift:] for t in tokens], config.exact_batches) for shift in shifts]
        for row, (index, sequence) in enumerate(zip(batch, tokens, strict=True)):
            yield (
                index,
                sequence,
                [Grid(shift, sequence[shift:], per_shift[shift][row]) for shift in shifts],
            )


def selected(num_available: int, max_sequences: int | None) -> list[int]:
    """The sequences to score: all, or ``max_sequences`` of them, evenly spaced over the data."""
    count = min(num_available, max_sequences or num_available)
    return [i * num_available // count for i in range(count)]


def deal(indices: Sequence[int], crew: Ranks) -> list[int]:
    """The sequences this rank scores: every world_size-th of the selected ones."""
    return list(indices[crew.rank :: crew.world_size])


def gather(work: Callable[[], list[T]], crew: Ranks) -> list[T]:
    """Runs ``work`` on every rank and returns all ranks' items; a failure on one rank is raised on all of them."""

    def told() -> list[T]:
        try:
            return work()
        except EvaluationError as error:
            if crew.world_size == 1:
                raise
            raise EvaluationError(f"evaluation stopped because rank {crew.rank} failed: {error}") from error

    return [item for items in crew.everywhere(told) for item in items]


def _states(model: PatchModel, sequences: list[Tensor], alone: bool) -> list[Tensor]:
    """States ``[P, d]`` over the full patches of each sequence; equal lengths share a pass unless ``alone``."""
    k = model.patch_size
    full = [t[: len(t) // k * k] for t in sequences]
    if alone or len({len(t) for t in full}) > 1 or not len(full[0]):
        return [model.hidden(t[None])[0] if len(t) else torch.empty(0, 1, device=t.device) for t in full]
    return list(model.hidden(torch.stack(full)))


def _check_ids(index: int, tokens: Tensor, vocab_size: int) -> None:
    if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        raise EvaluationError(
            f"sequence {index} holds token id {int(tokens.max())}; the model's vocabulary has {vocab_size} ids. "
            "Was the data prepared with this run's tokenizer?"
        )


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
