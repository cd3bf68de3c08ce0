"""What a command writes as a folder appears whole, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calm_scale.config import ConfigError
from calm_scale.stages.run_folder import appearing_whole, refuse_unless_empty


def test_a_folder_appears_when_all_is_written(tmp_path: Path) -> None:
    for folder in (tmp_path / "new" / "deep", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with appearing_whole(folder) as partial:
            (partial / "a").write_text("1")
            assert not (folder / "a").exists()
        assert (folder / "a").read_text() == "1"
        assert list(folder.parent.glob("*.part")) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), appearing_whole(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from calm_scale.stages.run_folder import appearing_whole\n"
        "with appearing_whole(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'config.yaml').write_text('1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = tmp_path / "out"
    assert (
        subprocess.run([sys.executable, "-c", program, str(out)], check=False).returncode == -signal.SIGKILL
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.part"]
    with pytest.raises(ConfigError, match=r"out\.part: another command .* or one was killed; remove it"):
        refuse_unless_empty(out, "the imported run")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    refuse_unless_empty(tmp_path / "new", "the export")
    refuse_unless_empty(tmp_path, "the export")
    (tmp_path / "a").write_text("1")
    with pytest.raises(ConfigError, match="is not empty; give the export a folder of its own"):
        refuse_unless_empty(tmp_path, "the export")
    with pytest.raises(ConfigError, match="is a file"):
        refuse_unless_empty(tmp_path / "a", "the export")
