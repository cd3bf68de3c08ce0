"""Which ranks are stragglers, and how a measurement is written and read."""

from __future__ import annotations

from pathlib import Path

from calm_scale.config.run_folder import StageFolder
from calm_scale.record.json_lines import TAIL_BYTES, last_object
from calm_scale.record.rank_times import RankTimes, SlowRanks, Straggler, line_of, stragglers

NODES = ["n0", "n0", "n1", "n1"]


def measured(
    *busy: float | None, step: float = 1.0, peers: tuple[int, ...] = (0, 0, 0, 0)
) -> list[RankTimes]:
    """Ranks in a step of so many seconds, of which they are busy for these."""
    return [
        RankTimes(group, step, None if b is None else step - b) for b, group in zip(busy, peers, strict=True)
    ]


def test_a_rank_that_is_slow_three_times_in_a_row_is_a_straggler_since_the_first() -> None:
    judge = SlowRanks(NODES)
    assert judge.judge(10, 100.0, measured(0.5, 0.5, 0.75, 0.5)) == []
    assert judge.judge(20, 200.0, measured(0.5, 0.5, 0.9, 0.5)) == []
    assert judge.judge(30, 300.0, measured(0.5, 0.5, 0.7, 0.5)) == [Straggler(2, "n1", 1.4, 10, 100.0)]
    assert judge.judge(40, 400.0, measured(0.5, 0.5, 0.5, 0.5)) == []
    assert judge.judge(50, 500.0, measured(0.5, 0.5, 0.7, 0.5)) == []  # it begins anew


def test_ranks_are_compared_with_those_that_do_the_same_work() -> None:
    judge, peers = SlowRanks(NODES), (0, 0, 1, 1)
    for step in (1, 2, 3):
        found = judge.judge(step, 0.0, measured(0.2, 0.2, 0.8, 0.8, peers=peers))
    assert found == []
    for step in (4, 5, 6):
        found = judge.judge(step, 0.0, measured(0.2, 0.3, 0.8, 0.8, peers=peers))
    assert [(s.rank, s.times) for s in found] == [(1, 1.5)]


def test_a_rank_that_was_not_measured_is_neither_cleared_nor_counted() -> None:
    judge = SlowRanks(NODES)
    for step, slow in ((1, 0.9), (2, None), (3, 0.9)):
        assert judge.judge(step, 0.0, measured(0.5, 0.5, 0.5, slow)) == []
    assert [s.since_step for s in judge.judge(4, 0.0, measured(0.5, 0.5, 0.5, 0.9))] == [1]


def test_steps_of_a_few_milliseconds_have_no_stragglers() -> None:
    judge = SlowRanks(NODES)
    for step in range(1, 5):
        assert judge.judge(step, 0.0, measured(0.001, 0.001, 0.004, 0.001, step=0.005)) == []


def test_the_latest_line_names_the_stragglers_of_its_attempt(tmp_path: Path) -> None:
    path = StageFolder(tmp_path).ranks
    assert stragglers(path, 0) == ()
    slow = [Straggler(2, "n1", 1.4, 10, 100.0)]
    path.write_text(
        line_of(20, 3, 9.0, measured(0.5, 0.5, 0.7, None), []) + "\n"
        + line_of(30, 3, 9.0, measured(0.5, 0.5, 0.7, None), slow) + "\n" + '{"torn'
    )  # fmt: skip
    assert stragglers(path, 3) == tuple(slow)
    assert stragglers(path, 4) == ()
    latest = last_object(path)
    assert latest is not None
    assert latest["waited"] == [0.5, 0.5, 0.3, None]
    assert str(slow[0]) == (
        "rank 2 on n1 takes 1.40 times as long as the median of the ranks with the same work, since step 10"
    )


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + " " * TAIL_BYTES)
    assert last_object(path) is None
    with path.open("a") as file:
        file.write('\n{"a": 2}\n')
    assert last_object(path) == {"a": 2}
