"""Each worker process keeps to cores of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from data_prep.prep.workers import keep_to_share_of_cores


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


def test_a_process_stays_on_its_cores() -> None:
    mine = sorted(os.sched_getaffinity(0))
    script = (
        "import os; from data_prep.prep.workers import keep_to_share_of_cores as keep; "
        f"keep({len(mine) - 1}, {len(mine)}); print(*os.sched_getaffinity(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(mine[-1])]
