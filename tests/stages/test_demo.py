"""The demo's own rules: whose folder it may clear, what it types, what it reads back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from calm_scale.config import load
from calm_scale.stages.demo.commands import DemoError, DemoFolder, mpirun, run, shown
from calm_scale.stages.demo.report import draw
from calm_scale.stages.launch import this_program


def test_it_clears_its_own_folder_only(tmp_path: Path) -> None:
    mine = DemoFolder(tmp_path / "demo")
    mine.start_anew()
    (mine.out / "old").touch()
    mine.start_anew()
    assert not (mine.out / "old").exists()
    somebody = tmp_path / "thesis"
    somebody.mkdir()
    (somebody / "chapter1.tex").touch()
    with pytest.raises(DemoError, match="holds other files"):
        DemoFolder(somebody).start_anew()
    assert (somebody / "chapter1.tex").exists()


@pytest.mark.parametrize("quick", [False, True])
def test_its_document_is_an_ordinary_one(tmp_path: Path, quick: bool) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.start_anew()
    config = folder.write_document(quick)
    assert load(folder.document) == config
    assert config.workdir == folder.run.resolve()
    assert config.prep is not None
    assert config.prep.sources[0].paths == (str(folder.corpus.resolve() / "*.jsonl.zst"),)


def test_commands_are_shown_as_a_user_types_them() -> None:
    assert shown(this_program("train-ae", "demo.yaml")) == "calm-scale train-ae demo.yaml"
    assert shown(mpirun(2, this_program("prep", "demo.yaml"))).endswith("-n 2 calm-scale prep demo.yaml")


def test_a_failing_step_ends_the_demo_with_its_command() -> None:
    with pytest.raises(DemoError, match="exit code 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"], Console(quiet=True))


def test_a_job_is_stopped_by_a_signal_and_may_answer_with_75(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)\n"
    )
    assert run([sys.executable, "-c", program], Console(quiet=True), stop_when=ready.exists) == 75


def test_75_without_our_signal_is_a_failure() -> None:
    with pytest.raises(DemoError, match="exit code 75"):
        run([sys.executable, "-c", "raise SystemExit(75)"], Console(quiet=True))


def test_a_curve_is_inline_svg_with_its_marks() -> None:
    rows = [{"step": s, "loss": 3.0 - s, **({"eval/loss": 2.5} if s == 1 else {})} for s in range(3)]
    curve = draw(rows, ["loss", "eval/loss"], "title", "caption", [(1, "resumed here")])
    assert curve.svg.startswith("<svg")
    assert "resumed here" in curve.svg
