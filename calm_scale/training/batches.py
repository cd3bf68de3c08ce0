"""From the stream of samples to one rank's micro-batches. The only state is a number: ``consumed_samples``.

The global batch of a step is the next G indices of the stream, whatever the layout. Index ``s + (a·DP + r)·b + j``
is sequence j of micro-batch a on data-parallel rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.host_copies import pinned
from calm_scale.training.engine import Batch
from data_prep.prefetch import prefetch


class Samples(Protocol):
    """Sequences of S = ``tokens_per_sample`` token ids; ``gather`` copies those of ``indices`` [n] into [n, S]."""

    tokens_per_sample: int

    def __len__(self) -> int: ...
    def gather(
        self, indices: npt.NDArray[np.integer], dtype: npt.DTypeLike | None = None, /
    ) -> npt.NDArray[np.integer]: ...


class Order(Protocol):
    """Which sample stands at a place of the endless stream (epoch after epoch)."""

    def __call__(self, stream_index: npt.NDArray[np.int64], /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class BatchPlan:
    """How G samples lie on the ranks: ``[A, DP, b]``."""

    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int

    @classmethod
    def of(cls, config: TrainingConfig, data_rank: int, data_size: int) -> BatchPlan:
        """Raises ValueError where global batch, micro-batch and data-parallel size do not divide."""
        config.accumulation(data_size)
        return cls(config.global_batch, config.micro_batch, data_rank, data_size)

    def stream_indices(self, consumed_samples: int) -> npt.NDArray[np.int64]:
        """``[A, b]`` places in the stream that this rank takes next."""
        places = np.arange(consumed_samples, consumed_samples + self.global_batch, dtype=np.int64)
        return places.reshape(-1, self.data_size, self.micro_batch)[:, self.data_rank]


CPU = torch.device("cpu")


class TrainingBatches:
    """The training stream of one data-parallel rank. ``device``: where the batches go; for a GPU they are pinned."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        plan: BatchPlan,
        end_of_data: str = "repeat",
        workers: int = 1,
        device: torch.device = CPU,
    ) -> None:
        if len(samples) == 0:
            raise ValueError("the training split holds no sequence")
        self.samples, self.order, self.plan = samples, order, plan
        self.end_of_data, self.workers, self.device = end_of_data, workers, device

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one global batch."""
        return self.plan.global_batch * self.samples.tokens_per_sample

    def exhausted(self, consumed_samples: int) -> bool:
        """With ``end_of_data: stop``: less than one global batch is left. The rest is not trained on, so every
        rank has the same number of micro-batches in every layout."""
        return self.end_of_data == "stop" and consumed_samples + self.plan.global_batch > len(self.samples)

    def at(self, step: int, consumed_samples: int) -> Batch:
        """The batch of a step, a pure function of its place in the stream."""
        places = self.plan.stream_indices(consumed_samples)
        picked = np.asarray(self.order(places.reshape(-1)))
        return _batch(step, self.samples, picked, places, self.device)

    def iterate(self, step: int, consumed_samples: int) -> Generator[Batch, None, None]:
        """Batches of steps ``step``, ``step + 1``, …; ends where the data does. Read ahead by ``workers`` threads,
        whose number changes nothing in the batches; close it after use."""
        jobs = self._jobs(step, consumed_samples)
        if self.workers:
            return prefetch(jobs, self.workers, depth=2 * self.workers)
        return (job() for job in jobs)

    def _jobs(self, step: int, consumed_samples: int) -> Iterator[Callable[[], Batch]]:
        while not self.exhausted(consumed_samples):
            yield partial(self.at, step, consumed_samples)
            step, consumed_samples = step + 1, consumed_samples + self.plan.global_batch


class EvaluationBatches:
    """A fixed set of held-out sequences in the shape of training batches: each counts once, whatever the layout.

    Args:
        device: where the batches go; for a GPU they are pinned.

    Attributes:
        num_samples: sequences that are evaluated: as many as asked for, or all there are.
        num_batches: global batches that hold them; the last one is filled up with sequences that do not count.
    """

    def __init__(
        self, samples: Samples, plan: BatchPlan, num_samples: int, device: torch.device = CPU
    ) -> None:
        if len(samples) == 0:
            raise ValueError("the evaluation split holds no sequence")
        self.samples, self.plan, self.device = samples, plan, device
        self.num_samples = min(num_samples, len(samples))
        self.num_batches = -(-self.num_samples // plan.global_batch)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that count."""
        return self.num_samples * self.samples.tokens_per_sample

    def iterate(self, step: int) -> Iterator[Batch]:
        """The same sequences every time, with ids 0, 1, …; ``step`` is the training step that is evaluated."""
        for index in range(self.num_batches):
            places = self.plan.stream_indices(index * self.plan.global_batch)
            batch = _batch(step, self.samples, places.reshape(-1) % self.num_samples, places, self.device)
            whole = (index + 1) * self.plan.global_batch <= self.num_samples
            yield batch if whole else replace(batch, counted=batch.sample_ids < self.num_samples)


def _batch(
    step: int,
    samples: Samples,
    picked: npt.NDArray[Any],
    places: npt.NDArray[np.int64],
    device: torch.device,
) -> Batch:
    tokens = torch.from_numpy(samples.gather(picked, np.int64)).view(*places.shape, -1)
    return Batch(step=step, tokens=pinned(tokens, device), sample_ids=torch.from_numpy(places.copy()))


class UntilStopped(Iterator[Batch]):
    """Batches that end early once ``told_to_stop`` says so, which is asked before each but the first.

    Attributes:
        stopped: whether they did.
    """

    def __init__(self, batches: Iterator[Batch], told_to_stop: Callable[[], bool]) -> None:
        self._batches, self._told_to_stop = batches, told_to_stop
        self._is_first = True
        self.stopped = False

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if not self._is_first and self._told_to_stop():
            self.stopped = True
            raise StopIteration
        self._is_first = False
        return batch
