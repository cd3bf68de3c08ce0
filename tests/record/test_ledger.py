"""The ledger survives crashes, and the account of a twice-resumed run counts no replay as progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calm_scale.accounting.goodput import accounts
from calm_scale.record.json_lines import append_lines
from calm_scale.record.ledger import Event, LedgerError, highest_step, history, line_of, next_attempt


def event(kind: str, attempt: int, step: int, time: float, **fields: Any) -> Event:
    return Event(kind=kind, attempt=attempt, stage="lm", step=step, time=time, **fields)  # type: ignore[arg-type]


def interrupted_run() -> list[Event]:
    """Save at 10; killed at 17; resumes from 10, killed at 23 with a save at 20; resumes from 20, ends at 30."""
    return [
        event("start", 0, 0, 0.0),
        event("progress", 0, 17, 34.0, steps_done=17, tokens=1700, seconds={"train": 30.0, "save": 4.0}),
        event("start", 1, 10, 100.0, first_step=10),
        event("progress", 1, 23, 130.0, first_step=10, steps_done=13, tokens=1300, seconds={"train": 26.0}),
        event("start", 2, 20, 200.0, first_step=20),
        event(
            "stop",
            2,
            30,
            225.0,
            first_step=20,
            steps_done=10,
            tokens=1000,
            padding_tokens=50,
            seconds={"train": 20.0, "eval": 5.0},
            cause="finished",
        ),
    ]


def test_round_trip_and_counters(tmp_path: Path) -> None:
    path = tmp_path / "lm" / "ledger.jsonl"
    assert next_attempt(history(path)) == 0
    for item in interrupted_run():
        append_lines(path, [line_of(item)])
    past = history(path)
    assert (list(past.events), past.damaged, past.damage) == (interrupted_run(), (), "")
    assert (next_attempt(past), highest_step(past)) == (3, 30)


def test_second_resume_counts_no_replay_as_progress() -> None:
    (run,) = accounts(interrupted_run())
    assert [a.steps_replayed for a in run.attempts] == [0, 7, 3]
    assert [a.cause for a in run.attempts] == ["killed", "killed", "finished"]
    assert run.steps_reached == sum(a.steps_progress for a in run.attempts) == 30
    assert run.tokens == 4000
    assert run.tokens_progress == pytest.approx(3000)
    useful = 30 + 26 * 6 / 13 + 20 * 7 / 10
    assert run.goodput == pytest.approx(useful / (34 + 30 + 25))


def test_attempt_that_never_reaches_new_steps_is_all_replay() -> None:
    events = [
        *interrupted_run()[:2],
        event("start", 1, 0, 50.0),
        event("progress", 1, 5, 60.0, steps_done=5, tokens=500, seconds={"train": 10.0}),
        event("start", 2, 5, 70.0, first_step=5),
        event("stop", 2, 20, 99.0, first_step=5, steps_done=15, tokens=1500, cause="finished"),
    ]
    (run,) = accounts(events)
    assert [a.steps_progress for a in run.attempts] == [17, 0, 3]
    assert run.steps_reached == 20


def test_torn_line_of_a_killed_attempt_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second, third, *_ = interrupted_run()
    append_lines(path, [line_of(first)])
    append_lines(path, [line_of(second)])
    path.write_bytes(path.read_bytes()[:-20])
    assert history(path).events == (first,)
    append_lines(path, [line_of(third)])
    assert history(path).events == (first, third) and not history(path).damaged


def test_damage_inside_an_attempt_is_passed_over_and_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for item in interrupted_run()[:2]:
        append_lines(path, [line_of(item)])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[:-9] + b"\n" + second + b"\n")
    past = history(path)
    assert (past.events, past.damaged) == ((interrupted_run()[1],), (1,))
    assert past.damage.startswith("1 unreadable line (1); what only it recorded")


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "party"}',
        "[1]",
        '{"time":0}',
        '{"kind": "start", "attempt": 0, "stage": "lm", "step": 1, "time": 0, "mood": 1}',
        '{"kind": "start", "attempt": "0", "stage": "lm", "step": 1, "time": 0}',
        '{"kind": "start", "attempt": 0, "stage": "lm", "step": 1, "time": NaN}',
        '{"kind": "start", "attempt": 0, "stage": "lm", "step": 1, "time": 0, "seconds": {"train": null}}',
        '{"version": "1", "kind": "start", "attempt": 0, "stage": "lm", "step": 1, "time": 0}',
    ],
)
def test_foreign_lines_are_damage_and_the_attempt_still_rises(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(line + "\n")
    past = history(path)
    assert (past.events, past.damaged, next_attempt(past)) == ((), (1,), 1)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"version": 2, "kind": "start"}\n')
    with pytest.raises(LedgerError, match=":1: ledger format 2"):
        history(path)


def test_steps_after_the_last_line_of_a_killed_attempt_are_known_from_its_successor() -> None:
    events = interrupted_run()
    events[2] = event("start", 1, 10, 100.0, first_step=10, highest_step=19)
    (run,) = accounts(events)
    first, second, _ = run.attempts
    assert (first.last_step, first.steps_unrecorded) == (17, 2)
    assert second.steps_replayed == 9
    assert sum(a.steps_progress + a.steps_unrecorded for a in run.attempts) == run.steps_reached == 30
