"""From the stream of samples to one rank's micro-batches. The only state is a number: ``consumed_samples``.

The global batch of a step is the next G indices of the stream, whatever the layout. Index ``s + (a·DP + r)·b + j``
is sequence j of micro-batch a on data-parallel rank r.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from calm_scale.config.training import TrainingConfig
from calm_scale.training.engine import Batch


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


class TrainingBatches:
    """The training stream of one data-parallel rank."""

    def __init__(
        self, samples: Samples, order: Order, plan: BatchPlan, end_of_data: str = "repeat", workers: int = 1
    ) -> None:
        if len(samples) == 0:
            raise ValueError("the training split holds no sequence")
        self.samples, self.order, self.plan = samples, order, plan
        self.end_of_data, self.workers = end_of_data, workers

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
        return _batch(step, self.samples, picked, places)

    def iterate(self, step: int, consumed_samples: int) -> Iterator[Batch]:
        """Batches of steps ``step``, ``step + 1``, …; ends where the data does. Read ahead by ``workers`` threads."""
        if self.workers == 0:
            return self._inline(step, consumed_samples)
        return _ReadAhead(self, step, consumed_samples)

    def _inline(self, step: int, consumed_samples: int) -> Iterator[Batch]:
        while not self.exhausted(consumed_samples):
            yield self.at(step, consumed_samples)
            step, consumed_samples = step + 1, consumed_samples + self.plan.global_batch


class EvaluationBatches:
    """A fixed set of held-out sequences in the shape of training batches: each counts once, whatever the layout.

    Attributes:
        num_samples: sequences that are evaluated: as many as asked for, or all there are.
        num_batches: global batches that hold them; the last one is filled up with sequences that do not count.
    """

    def __init__(self, samples: Samples, plan: BatchPlan, num_samples: int) -> None:
        if len(samples) == 0:
            raise ValueError("the evaluation split holds no sequence")
        self.samples, self.plan = samples, plan
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
            batch = _batch(step, self.samples, places.reshape(-1) % self.num_samples, places)
            whole = (index + 1) * self.plan.global_batch <= self.num_samples
            yield batch if whole else replace(batch, counted=batch.sample_ids < self.num_samples)


def _batch(step: int, samples: Samples, picked: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> Batch:
    tokens = torch.from_numpy(samples.gather(picked, np.int64)).view(*places.shape, -1)
    return Batch(step=step, tokens=tokens, sample_ids=torch.from_numpy(places.copy()))


_PATIENCE_SECONDS = 5.0


class _ReadAhead(Iterator[Batch]):
    """Worker w reads every ``workers``-th batch; they are handed out in order, so the count changes nothing."""

    def __init__(self, batches: TrainingBatches, step: int, consumed_samples: int, depth: int = 2) -> None:
        self._stop = threading.Event()
        self._queues: list[queue.Queue[Batch | BaseException | None]] = [
            queue.Queue(maxsize=depth) for _ in range(batches.workers)
        ]
        self._next = 0
        self._threads: list[threading.Thread] = []
        for worker, out in enumerate(self._queues):
            thread = threading.Thread(
                target=self._read, args=(batches, step, consumed_samples, worker, out), daemon=True
            )
            thread.name = f"read-ahead-{worker}"
            thread.start()
            self._threads.append(thread)

    def _read(
        self,
        batches: TrainingBatches,
        step: int,
        consumed: int,
        worker: int,
        out: queue.Queue[Batch | BaseException | None],
    ) -> None:
        try:
            offset = worker
            while not self._stop.is_set():
                place = consumed + offset * batches.plan.global_batch
                if batches.exhausted(place):
                    self._put(out, None)
                    return
                self._put(out, batches.at(step + offset, place))
                offset += batches.workers
        except BaseException as error:  # handed to the loop, which raises it
            self._put(out, error)

    def _put(
        self, out: queue.Queue[Batch | BaseException | None], item: Batch | BaseException | None
    ) -> None:
        while not self._stop.is_set():
            try:
                out.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def __next__(self) -> Batch:
        item = self._queues[self._next % len(self._queues)].get()
        if item is None:
            self.close()
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._next += 1
        return item

    def close(self) -> None:
        """Ends the reader threads, and waits for them a little: one that is inside of torch while the interpreter
        ends would abort the process."""
        self._stop.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
