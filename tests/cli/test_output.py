"""No locale and no closed output costs a command its work or its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PLAN = [sys.executable, "-m", "calm_scale", "plan", "configs/lm/calm-m.yaml"]


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", line, "bash", *PLAN],
        capture_output=True,
        timeout=120,
        cwd=REPO,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_degrades_the_output(encoding: str) -> None:
    done = _shell('"$@" && "${@:1:3}" --help', PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding)
    assert "text -> shards ->" in text and "Layouts, best first" in text
    assert "?" not in text.split("Layouts")[0]


def test_json_lines_on_a_narrow_stdout_keep_every_character() -> None:
    program = (
        "from calm_scale.config.terminal import survive_any_output as s; s()\n"
        "from calm_scale.stages.texts import write_lines as w; w([{'text': 'é→😀'}], None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert json.loads(done.stdout.decode("ascii")) == {"text": "é→😀"}


@pytest.mark.parametrize(
    "line", ['"$@" >&-', '"$@" 2>&-', '"$@" | true; exit ${PIPESTATUS[0]}', '"$@" 2>/dev/full']
)
def test_output_that_nobody_reads_does_not_change_the_exit_code(line: str) -> None:
    done = _shell(line)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_a_file_opened_by_a_command_does_not_become_its_closed_stderr(tmp_path: Path) -> None:
    done = _shell(f'"$@" --json {tmp_path}/plan.json 2>&- >&-')
    assert done.returncode == 0
    layouts = json.loads((tmp_path / "plan.json").read_text())["sections"]["layouts"]["tables"]["layouts"]
    assert layouts["rows"][0]["tensor"] >= 1


def test_process_substitution_receives_the_file() -> None:
    done = _shell('"$@" --json >(wc -c >&2) >/dev/null; sleep 0.5')
    assert done.returncode == 0
    assert int(done.stderr.split()[0]) > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        "--price nan",
        "--price inf",
        "--price -1",
        "--price 1e300",
        "--gpus-per-node 1000000000",
        "--json configs/lm/calm-m.yaml",
    ],
)
def test_amounts_and_files_that_make_no_sense_are_refused(arguments: str) -> None:
    done = _shell(f'"$@" {arguments}')
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
