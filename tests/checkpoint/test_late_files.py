"""Ranks that see a shared folder at different times: waiting together, and which step is resumed."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import ConfigError, files
from calm_scale.config.files import FILE_WAIT_VARIABLE, LateFileError, file_wait_seconds, wait_until_visible
from calm_scale.config.training import CheckpointConfig
from calm_scale.runtime.world import World
from launchers.ranks import files_under, see_alike

OnTwoRanks = Callable[[Callable[[World], object]], list[BaseException | None]]


@pytest.fixture
def views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "1")
    found = [tmp_path / "rank0", tmp_path / "rank1"]
    for view in found:
        view.mkdir()
    (found[1] / "card.json").write_text("whole")
    return found


@pytest.mark.parametrize("shown", ["", "wh"])
def test_a_late_or_short_file_is_waited_for_by_all_ranks(
    views: list[Path], shown: str, on_two_ranks: OnTwoRanks
) -> None:
    if shown:
        (views[0] / "card.json").write_text(shown)
    timer = threading.Timer(0.4, lambda: (views[0] / "card.json").write_text("whole"))
    timer.start()
    begun = time.monotonic()
    errors = on_two_ranks(lambda world: see_alike(world, views[0], lambda: files_under(views[world.rank])))
    assert errors == [None, None]
    assert time.monotonic() - begun >= 0.4


def test_a_file_that_stays_invisible_ends_all_ranks_with_one_message(
    views: list[Path], on_two_ranks: OnTwoRanks
) -> None:
    errors = on_two_ranks(lambda world: see_alike(world, views[0], lambda: files_under(views[world.rank])))
    assert [type(error) for error in errors] == [LateFileError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "card.json (5 bytes): rank 1 on " in str(errors[0])
    assert "sees it, rank 0 on " in str(errors[0])


def test_what_no_rank_sees_is_not_waited_for(
    views: list[Path], on_two_ranks: OnTwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "60")
    (views[1] / "card.json").unlink()
    begun = time.monotonic()
    errors = on_two_ranks(lambda world: see_alike(world, views[0], lambda: files_under(views[world.rank])))
    assert errors == [None, None]
    assert time.monotonic() - begun < 30


def test_one_process_waits_with_a_word_and_says_what_never_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "0.6")
    monkeypatch.setattr(files, "FILE_NOTICE_SECONDS", 0.2)
    assert wait_until_visible(lambda: "records/3.json") == "records/3.json"
    assert capsys.readouterr().err.count("not visible here yet: records/3.json") == 1
    answers = iter(["records/3.json", ""])
    assert wait_until_visible(lambda: next(answers)) == ""
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "soon")
    with pytest.raises(ConfigError, match="FILE_WAIT_SECONDS=soon: give a number"):
        file_wait_seconds()


@pytest.mark.parametrize("comes", [True, False])
def test_the_newest_step_that_any_rank_sees_is_waited_for_and_never_passed_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: CheckpointStore,
    save: Callable[..., Path],
    comes: bool,
    on_two_ranks: OnTwoRanks,
) -> None:
    """Rank 0 sees step 200 late, or not at all."""
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "20" if comes else "1")
    save(100)
    late = tmp_path / "late"
    shutil.copytree(store.root, late)
    newest = save(200)
    if comes:
        shutil.copytree(newest, late / "coming")
        threading.Timer(0.5, lambda: (late / "coming").rename(late / newest.name)).start()
    steps: dict[int, int] = {}

    def resume(world: World) -> None:
        root = late if world.is_first else store.root
        found = CheckpointStore(root, world, CheckpointConfig(), run_id="run-a").newest()
        assert found is not None
        steps[world.rank] = found.step

    errors = on_two_ranks(resume)
    if comes:
        assert (errors, steps) == ([None, None], {0: 200, 1: 200})
    else:
        assert [type(error) for error in errors] == [LateFileError] * 2
        assert "step_00000200" in str(errors[0])
        assert newest.is_dir()
