"""The sequences of an evaluation, dealt to ranks, with the teacher-forced states of each of their grids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from calm_scale.evaluation.brier import EvaluationError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from calm_scale.config.evaluation import EvaluationConfig
    from calm_scale.lm.patch_model import PatchModel

T = TypeVar("T")


class TokenBlocks(Protocol):
    """Tokenized sequences: ``ShardDataset``, or any list of 1-D integer arrays (the last may be shorter)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[Any]: ...


class Crew(Protocol):
    """The holders of a model that share an evaluation: each scores its own sequences."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Every holder's result, on all of them; one's error too."""
        ...


@dataclass(frozen=True)
class Alone:
    """A crew of one."""

    rank: int = 0
    world_size: int = 1

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """The one result."""
        return [work()]


@dataclass(frozen=True)
class Teams:
    """A crew whose members are teams of ``tensor`` consecutive ranks, each team with one model split over it.

    All ranks of a team score the same sequences and find the same numbers; its first rank's are gathered. An error is
    raised at once on its own rank alone: the others of its team may wait for it inside a layer and could not be told.
    """

    ranks: Crew
    tensor: int

    @property
    def rank(self) -> int:
        """This rank's team."""
        return self.ranks.rank // self.tensor

    @property
    def world_size(self) -> int:
        """Number of teams."""
        return self.ranks.world_size // self.tensor

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """One result a team, on every rank."""
        mine = work()
        return self.ranks.everywhere(lambda: mine)[:: self.tensor]


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
    device = getattr(model, "device", torch.device("cpu"))
    shifts = range(model.patch_size) if config.coverage == "all" else range(1)
    for begin in range(0, len(indices), config.batch_size):
        batch = indices[begin : begin + config.batch_size]
        tokens = [torch.from_numpy(np.asarray(dataset[i]).astype(np.int64)).to(device) for i in batch]
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


def deal(indices: Sequence[int], crew: Crew) -> list[int]:
    """The sequences this rank scores: every world_size-th of the selected ones."""
    return list(indices[crew.rank :: crew.world_size])


def gather(work: Callable[[], list[T]], crew: Crew) -> list[T]:
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
