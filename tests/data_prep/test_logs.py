"""What lands in a log file: plain lines, whatever terminal mpirun gives its ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from calm_scale.config import to_yaml
from calm_scale.stages.evaluate import shown


@pytest.mark.ranks
def test_a_log_of_mpirun_holds_no_escape_codes(
    tmp_path: Path, make_config: Callable, kit: SimpleNamespace
) -> None:
    document = tmp_path / "run.yaml"
    source = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60))
    document.write_text(to_yaml(make_config(source, sequence_length=32)))
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [
        mpirun,
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "calm_scale",
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI"))}
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            [*command, "prep", document],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            check=True,
            timeout=120,
        )
    said = (tmp_path / "log").read_bytes()
    assert b"documents kept" in said
    assert b"\x1b" not in said
    assert b"\r" not in said


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with shown("scored", Console(file=out), line_seconds=0.0) as progress:
        progress(3, 7)
    assert out.getvalue() == "scored: 3 of 7\n"
    with shown("scored", Console(file=out, quiet=True), line_seconds=0.0) as progress:
        progress(4, 7)
    assert out.getvalue() == "scored: 3 of 7\n"
