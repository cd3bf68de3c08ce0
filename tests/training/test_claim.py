"""Two trainings never write one folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calm_scale.runtime.world import World
from calm_scale.training.attempt import FolderInUseError, claimed

HOLD = """
import sys, time, torch
from collections.abc import Iterator
from pathlib import Path
from calm_scale.runtime.world import World
from calm_scale.training.attempt import claimed
with claimed(Path(sys.argv[1]), World(0, 1, 0, 1, torch.device("cpu"), "gloo")):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lm")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_training_is_refused_and_told_who_is_there(
    tmp_path: Path, solo: World, holder: subprocess.Popen[str]
) -> None:
    with (
        pytest.raises(FolderInUseError, match=rf"lm is being trained by process {holder.pid} on "),
        claimed(tmp_path / "lm", solo, patience=0.3),
    ):
        pass


def test_a_killed_training_holds_nothing(tmp_path: Path, solo: World, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with claimed(tmp_path / "lm", solo):
        pass
    with claimed(tmp_path / "lm", solo, patience=0):
        pass
