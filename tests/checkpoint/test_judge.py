"""One judge: the list, the resume, the status and the job script give the same answer on any checkpoints folder."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from calm_scale.checkpoint.card import Card, Counters, mark_suspect
from calm_scale.checkpoint.errors import NothingToResumeError
from calm_scale.checkpoint.judge import Entry, find, inventory, newest, run_id, verify
from calm_scale.checkpoint.status import stage_status
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config.errors import EXIT_ERROR, EXIT_OK
from calm_scale.config.training import CheckpointConfig
from calm_scale.record.json_lines import append_lines
from calm_scale.record.ledger import Event, line_of
from calm_scale.runtime.world import World
from calm_scale.stages.checkpoints import print_newest, verify_checkpoint

Make = Callable[..., Card]
Write = Callable[[Path], None]
PREAMBLE = Path(__file__).parents[2] / "slurm" / "preamble.sh.j2"


class Stage:
    """A stage's folder with checkpoints of one run, and ways to spoil them."""

    def __init__(self, folder: Path, world: World, card_of: Make, write: Write) -> None:
        self.folder, self.root, self.world = folder, folder / "checkpoints", world
        self._card_of, self._write = card_of, write
        self.own = run_id(folder, "run")

    def store(self, name: str | None = None) -> CheckpointStore:
        return CheckpointStore(self.root, self.world, CheckpointConfig(), run_id=name or self.own)

    def save(self, step: int, name: str | None = None, **more: object) -> Path:
        card = self._card_of(step, run_id=name or self.own, **more)
        return self.store(name).save(step, self._write, card)

    def resumed(self) -> int | None:
        """The step that a training would take; None for a start at step 0 or a refusal."""
        try:
            found = self.store().newest()
        except NothingToResumeError:
            return None
        return None if found is None else found.step

    def listed(self) -> int | None:
        return max((e.step for e in inventory(self.folder) if e.state == "complete"), default=None)


@pytest.fixture
def stage(tmp_path: Path, solo: World, card_of: Make, write: Write) -> Stage:
    return Stage(tmp_path / "lm", solo, card_of, write)


def a_free_name(path: Path) -> Path:
    return path.with_name(f"step_{random.Random(path.name).randint(500, 900):08d}")


SPOIL: dict[str, Callable[[Path], object]] = {
    "renamed": lambda path: path.rename(a_free_name(path)),
    "half written": lambda path: path.rename(path.with_name(path.name + ".tmp")),
    "re-dated": lambda path: [os.utime(file, (1, 1)) for file in (path, *path.rglob("*"))],
    "emptied": lambda path: [os.truncate(file, 0) for file in path.rglob("*.bin")],
    "shard lost": lambda path: (path / "shards/rank_0.bin").unlink(),
    "card lost": lambda path: (path / "card.json").unlink(),
    "list lost": lambda path: (path / "manifest.json").unlink(),
    "nothing left": lambda path: [shutil.rmtree(path), path.mkdir()],
    "marked": lambda path: mark_suspect(path, "no step after it was finite"),
    "mark unreadable": lambda path: (path / "suspect.json").write_text("{"),
    "gone": shutil.rmtree,
}


def test_renaming_a_checkpoint_makes_it_damaged_for_everyone(stage: Stage) -> None:
    stage.save(3), stage.save(5)
    (stage.root / "step_00000005").rename(stage.root / "step_00000009")
    assert [(e.step, e.state, e.reason) for e in inventory(stage.root, deep=True)] == [
        (3, "complete", ""),
        (9, "damaged", "its card.json is of step 5; if the folder was renamed, rename it back"),
    ]
    found = stage.store().newest()
    assert found is not None and found.step == 3
    assert found.passed_over == (
        "step_00000009: its card.json is of step 5; if the folder was renamed, rename it back",
    )
    assert verify(stage.root / "step_00000009").state == "damaged"
    assert verify_checkpoint(stage.root / "step_00000009") == EXIT_ERROR
    assert stage_status(stage.folder).checkpoint_step == 3


@pytest.mark.parametrize("seed", range(12))
def test_list_resume_status_and_run_id_agree_on_spoilt_folders(seed: int, stage: Stage) -> None:
    chance = random.Random(seed)
    append_lines(
        stage.folder / "ledger.jsonl", [line_of(Event(kind="start", attempt=0, stage="lm", step=0, time=1.0))]
    )
    for step in sorted(chance.sample(range(1, 400), 6)):
        if chance.random() < 0.2:
            stage.save(step, "run-b")
        else:
            stage.save(step, suspect="the last step was not finite" if chance.random() < 0.2 else "")
    for path in sorted(stage.root.glob("step_*")):
        if chance.random() < 0.6:
            SPOIL[chance.choice(sorted(SPOIL))](path)
    agreed = stage.listed()
    assert stage.resumed() == agreed
    assert stage_status(stage.folder).checkpoint_step == agreed
    assert (entry.step if (entry := newest(stage.root)) else None) == agreed
    if agreed is not None:
        assert find(stage.folder).step == agreed
    (stage.folder / "run.json").unlink()
    latest = max(
        (e for e in inventory(stage.root) if e.is_whole and e.card),
        key=lambda entry: entry.card.created if entry.card else 0.0,
        default=None,
    )
    if latest is not None:
        assert run_id(stage.folder, "run") == latest.run_id


def run_function(name: str, stage: Stage, before: str = "") -> str:
    """What a function of the job script prints, outside of a container."""
    tool = function_of(PREAMBLE.with_name("container.sh.j2"), "tool")
    setting = (
        f"PROGRESS=('{stage.root}') index=0 STAGE=lm PYTHON='{sys.executable}' STATE='{stage.folder}'\n"
        "CONTAINER='' WRAPPER=() SETUP_PROBLEM='' CONTAINER_PROBLEM='' UNANSWERED=0 STARTED_AT=-1 EVALUATED=none\n"
    )
    shell = ["bash", "-uc", f"{setting}{before}\n{tool}{function_of(PREAMBLE, name)}{name}"]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout


def function_of(template: Path, name: str) -> str:
    """One function of the job script, as it stands in its template."""
    text = template.read_text()
    start = text.index(f"\n{name}() {{") + 1
    return text[start : text.index("\n}\n", start) + 3]


def script_says(stage: Stage) -> int:
    return int(run_function("progress", stage))


def test_the_job_script_evaluates_what_may_be_resumed(stage: Stage) -> None:
    sbatch = (
        f"EVAL_SCRIPT=eval ATTEMPT_LOGS='{stage.folder}'; exec 3>&1\n"
        'client() { echo "STEP=$CALM_SCALE_EVAL_STEP" >&3; echo 77; }'
    )
    assert run_function("ask_for_evaluations", stage, sbatch) == ""
    stage.save(4), stage.save(6), stage.save(8, suspect="the last step was not finite")
    SPOIL["renamed"](stage.save(10)), SPOIL["half written"](stage.save(12))
    (stage.folder / "eval-00000004.submitted").touch()
    assert run_function("ask_for_evaluations", stage, sbatch) == "STEP=6\n"
    assert (stage.folder / "eval-00000006.submitted").exists()


def test_the_job_script_asks_the_judge(stage: Stage) -> None:
    assert script_says(stage) == -1
    stage.save(4), stage.save(6), stage.save(8, suspect="the last step was not finite")
    stage.save(7, "run-b"), SPOIL["renamed"](stage.save(10)), SPOIL["half written"](stage.save(12))
    assert script_says(stage) == stage.listed() == stage.resumed() == 6


def test_the_command_prints_the_newest_step(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.save(4)
    assert print_newest(stage.folder) == EXIT_OK
    assert capsys.readouterr().out == "4\n"


def test_a_suspect_is_resumed_only_when_it_is_asked_for(stage: Stage) -> None:
    stage.save(2), stage.save(4)
    mark_suspect(stage.root / "step_00000004", "no step after 3 was finite")
    assert Card.read(stage.root / "step_00000004").suspect == "no step after 3 was finite"
    assert stage.resumed() == 2
    asked = stage.store().newest(step=4)
    assert asked is not None and asked.step == 4
    assert find(stage.root).step == 2 and find(stage.root, step=4).step == 4
    assert verify_checkpoint(stage.root / "step_00000004") == EXIT_OK
    shutil.rmtree(stage.root / "step_00000002")
    with pytest.raises(NothingToResumeError, match=r"suspect: no step after 3 .*\n.*--resume-step 4"):
        stage.store().newest()


def test_a_card_without_the_newer_fields_is_read(stage: Stage) -> None:
    path = stage.save(4)
    assert '"suspect": ""' in (path / "card.json").read_text()
    (path / "card.json").write_text((path / "card.json").read_text().replace(',\n "suspect": ""', ""))
    assert "suspect" not in (path / "card.json").read_text()
    assert Card.read(path).suspect == ""


def test_nothing_is_removed_before_the_rotation_and_suspects_do_not_count(stage: Stage) -> None:
    store = CheckpointStore(stage.root, stage.world, CheckpointConfig(keep_last=2), run_id=stage.own)

    def save(step: int, suspect: str = "") -> None:
        card = stage._card_of(step, run_id=stage.own, suspect=suspect, counters=Counters(steps=step))
        store.save(step, stage._write, card)

    def names() -> list[tuple[int, str]]:
        store.close()
        return [(entry.step, entry.state) for entry in inventory(stage.root)]

    for step in (1, 2, 3):
        save(step)
    save(4, suspect="the last step was not finite")
    assert names() == [(1, "complete"), (2, "complete"), (3, "complete"), (4, "suspect")]
    assert (stage.root / "latest").read_text() == "step_00000003\n"
    store.rotate()
    assert names() == [(2, "complete"), (3, "complete"), (4, "suspect")]
    save(5)
    store.rotate()
    assert names() == [(3, "complete"), (4, "suspect"), (5, "complete")]
    save(6)
    store.rotate()
    assert names() == [(5, "complete"), (6, "complete")]


def test_a_suspect_gives_way_to_a_new_save_of_its_step(stage: Stage) -> None:
    stage.save(4, suspect="the last step was not finite")
    stage.save(4)
    entries: list[Entry] = inventory(stage.root)
    assert [(entry.step, entry.state) for entry in entries] == [(4, "complete")]
