"""Each worker process keeps to cores of its own."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from data_prep.processes import keep_to_share_of_cores


@pytest.mark.parametrize(
    "cores, count, shares",
    [
        ({0, 1}, 2, [{0}, {1}]),
        ({3, 5, 8, 9}, 2, [{3, 5}, {8, 9}]),
        ({0, 1, 2, 3, 4}, 2, [{0, 1}, {2, 3}]),
        ({0}, 2, [None, None]),
    ],
)
def test_shares_are_equal_and_disjoint(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], count: int, shares: list[set[int] | None]
) -> None:
    kept: list[set[int] | None] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    for number in range(count):
        kept.append(None)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: kept.__setitem__(-1, set(mask)))
        keep_to_share_of_cores(number, count)
    assert kept == shares


def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def refuse(pid: int, mask: list[int]) -> None:
        asked.append(mask)
        raise OSError("not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    keep_to_share_of_cores(0, 1)
    assert asked


def _report(number: int, count: int, found: multiprocessing.Queue[set[int]]) -> None:
    keep_to_share_of_cores(number, count)
    found.put(os.sched_getaffinity(0))


def test_a_worker_process_stays_on_its_cores() -> None:
    context = multiprocessing.get_context("spawn")
    mine = sorted(os.sched_getaffinity(0))
    found: multiprocessing.Queue[set[int]] = context.Queue()
    child = context.Process(target=_report, args=(len(mine) - 1, len(mine), found))
    child.start()
    try:
        assert found.get(timeout=60) == {mine[-1]}
    finally:
        child.join()
