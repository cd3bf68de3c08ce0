"""Which samples which rank sees at which step."""

from __future__ import annotations

import threading
from contextlib import closing
from itertools import chain
from types import ModuleType

import numpy as np
import pytest
import torch

from calm_scale.runtime.host_copies import sent
from calm_scale.training.batches import BatchPlan, EvaluationBatches, TrainingBatches
from data_prep.shards.order import SampleOrder


def plans(global_batch: int, micro_batch: int, data_size: int) -> list[BatchPlan]:
    return [BatchPlan(global_batch, micro_batch, rank, data_size) for rank in range(data_size)]


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_a_step_is_the_next_indices_whatever_the_layout(data_size: int) -> None:
    shares = [plan.stream_indices(36) for plan in plans(12, 2, data_size)]
    assert {share.shape for share in shares} == {(12 // data_size // 2, 2)}
    assert sorted(np.concatenate([share.ravel() for share in shares])) == list(range(36, 48))


def test_micro_batches_are_cut_across_ranks() -> None:
    first, second = plans(12, 2, 2)
    assert first.stream_indices(0).tolist() == [[0, 1], [4, 5], [8, 9]]
    assert second.stream_indices(0).tolist() == [[2, 3], [6, 7], [10, 11]]


def stream(tiny: ModuleType, workers: int, end_of_data: str = "repeat", count: int = 50) -> TrainingBatches:
    return TrainingBatches(
        tiny.Sequences(count), SampleOrder(count, 7), BatchPlan(12, 2, 0, 1), end_of_data, workers
    )


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_workers_change_nothing(workers: int, tiny: ModuleType) -> None:
    batches = stream(tiny, workers).iterate(step=4, consumed_samples=36)
    for step in range(4, 12):
        batch = next(batches)
        expected = stream(tiny, 0).at(step, 36 + (step - 4) * 12)
        assert batch.step == step
        assert batch.sample_ids.flatten().tolist() == list(range(step * 12 - 12, step * 12))
        assert batch.tokens.equal(expected.tokens)


@pytest.mark.parametrize("workers", [0, 2])
def test_end_of_data_stops_before_a_partial_batch(workers: int, tiny: ModuleType) -> None:
    ids = [batch.sample_ids.flatten().tolist() for batch in stream(tiny, workers, "stop").iterate(1, 0)]
    assert list(chain.from_iterable(ids)) == list(range(48))


@pytest.mark.parametrize("consumed", [0, 37, 38, 49, 50])
def test_the_next_epoch_holds_every_sample_once(consumed: int, tiny: ModuleType) -> None:
    order = SampleOrder(50, 7)
    batches = stream(tiny, 0)
    seen = [i for start in range(0, 300, 12) for i in batches.at(1, start).sample_ids.flatten().tolist()]
    assert sorted(order(np.array(seen[50:100]))) == list(range(50))
    assert batches.at(1, consumed).sample_ids.flatten().tolist() == list(range(consumed, consumed + 12))


def test_a_broken_read_reaches_the_loop(tiny: ModuleType) -> None:
    class Broken(tiny.Sequences):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> np.ndarray:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        next(TrainingBatches(Broken(50), SampleOrder(50, 0), BatchPlan(12, 2, 0, 1)).iterate(1, 0))


def test_no_reader_is_left_after_the_loop(tiny: ModuleType) -> None:
    """One that is inside of torch while the interpreter ends aborts the process."""
    others = set(threading.enumerate())
    batches = stream(tiny, 3).iterate(1, 0)
    next(batches)
    assert 0 < len(set(threading.enumerate()) - others) <= 3
    batches.close()
    assert set(threading.enumerate()) <= others


@pytest.mark.parametrize(
    ("asked", "there", "counted"), [(24, 30, 24), (64, 30, 30), (5, 30, 5), (24, 5, 5), (25, 30, 25)]
)
@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_evaluation_counts_every_sequence_once_in_every_layout(
    asked: int, there: int, counted: int, data_size: int, tiny: ModuleType
) -> None:
    shares = [EvaluationBatches(tiny.Sequences(there), plan, asked) for plan in plans(12, 2, data_size)]
    assert {share.num_samples for share in shares} == {counted}
    assert {share.num_batches for share in shares} == {-(-counted // 12)}
    assert shares[0].num_tokens == counted * 16
    ids = []
    for share in shares:
        for batch in share.iterate(3):
            assert batch.tokens.shape == (12 // data_size // 2, 2, 16)
            chosen = batch.sample_ids if batch.counted is None else batch.sample_ids[batch.counted]
            ids += chosen.flatten().tolist()
    assert sorted(ids) == list(range(counted))


def test_whole_batches_are_evaluated_as_they_were(tiny: ModuleType) -> None:
    batches = list(EvaluationBatches(tiny.Sequences(30), BatchPlan(12, 2, 0, 1), 25).iterate(3))
    assert [batch.counted is None for batch in batches] == [True, True, False]


class Pinned:
    """Notes what is pinned and copied, in place of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, str] = {}
        self.copied: list[bool] = []
        to = torch.Tensor.to

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            self.pinned[copy.data_ptr()] = threading.current_thread().name
            return copy

        def send(tensor: torch.Tensor, device: object = None, **kwargs: object) -> torch.Tensor:
            if not isinstance(device, torch.device) or device.type != "cuda":
                return to(tensor, device, **kwargs)
            self.copied.append(bool(kwargs.get("non_blocking")) and tensor.data_ptr() in self.pinned)
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "to", send)


def test_batches_for_a_gpu_are_pinned_by_the_reading_threads_and_hold_the_same(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, order, plan = Pinned(monkeypatch), SampleOrder(50, 7), BatchPlan(12, 2, 0, 1)
    for_gpu = TrainingBatches(tiny.Sequences(50), order, plan, device=torch.device("cuda"))
    plain = TrainingBatches(tiny.Sequences(50), order, plan)
    with closing(for_gpu.iterate(1, 0)) as batches:
        batch = next(batches)
    assert batch.tokens.equal(plain.at(1, 0).tokens)
    assert noted.pinned[batch.tokens.data_ptr()].startswith("prefetch")
    held_out = EvaluationBatches(tiny.Sequences(30), plan, 12, torch.device("cuda"))
    assert next(held_out.iterate(1)).tokens.data_ptr() in noted.pinned


def test_a_copy_to_a_gpu_is_queued_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Pinned(monkeypatch)
    sent(torch.arange(4), torch.device("cuda"))
    assert noted.copied == [True]
    row = torch.arange(4)
    assert sent(row, torch.device("cpu")) is row
