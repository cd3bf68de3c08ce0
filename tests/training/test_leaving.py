"""A rank that fails says why and is gone at once; one that has done its work is not held up by its clean-up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calm_scale.config.errors import ConfigError
from calm_scale.runtime import departure as leaving
from calm_scale.runtime.watchdog import Watchdog

PROGRAM = Path(__file__).with_name("leave_tiny.py")


def job(folder: Path, failing_step: int) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "launchers.local", "--nproc", "2", "--end-others-within", "1"]
    options = json.dumps({"training": {"steps": 6}})
    rank = [sys.executable, str(PROGRAM), str(folder), options, str(failing_step)]
    return subprocess.run(
        [sys.executable, *launcher, "--", *rank], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.ranks
def test_a_failing_rank_ends_the_job_although_the_other_waits_in_a_collective(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = job(tmp_path / "run", failing_step=5)
    assert time.monotonic() - started < 60, "start-up included"
    assert ended.returncode == 1
    assert "rank 1 on " in ended.stderr and "failed first: exit code 1" in ended.stderr
    assert "lm rank 1: failed in `training step 5` after step 4: RuntimeError: device lost" in ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert [(row["rank"], row["step"], row["error"]) for row in rows] == [(1, 4, "RuntimeError: device lost")]


@pytest.mark.ranks
def test_a_clean_up_that_blocks_does_not_hold_a_finished_job(tmp_path: Path) -> None:
    ended = job(tmp_path / "run", failing_step=0)
    assert ended.returncode == 0
    assert "the process groups did not close within 2 s" in ended.stderr


def test_alone_an_error_goes_its_normal_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), leaving.joined("lm"):
        raise ConfigError("lm.head: wrong")
    assert capsys.readouterr().err == ""


def test_an_error_is_attributed_to_the_innermost_operation() -> None:
    watchdog = Watchdog(60.0, "rank 0")
    error = ValueError("x")
    with pytest.raises(ValueError, match="x"), watchdog.doing("saving"), watchdog.doing("training step 3"):
        raise error
    assert watchdog.operation_of(error) == "training step 3"
    assert watchdog.operation_of(ValueError("y")) == "start-up"
    watchdog.close()
