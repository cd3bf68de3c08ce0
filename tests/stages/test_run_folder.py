"""What a command writes as a folder appears whole, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calm_scale.config import ConfigError
from calm_scale.stages.folders import appearing_whole, make_way


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


def killed(out: Path, by: signal.Signals) -> int:
    """The exit status of a command that gets the signal while it writes ``out``."""
    program = (
        "import os, signal, sys; from pathlib import Path; from calm_scale.stages.folders import appearing_whole\n"
        "with appearing_whole(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'config.yaml').write_text('1')\n"
        "    try:\n"
        "        os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    except BaseException as error:\n"
        "        raise RuntimeError('a library wraps it') from error"
    )
    argv = [sys.executable, "-c", program, str(out), str(int(by))]
    return subprocess.run(argv, check=False, capture_output=True).returncode


def test_what_a_kill_leaves_is_removed_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert killed(out, signal.SIGKILL) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.part"]
    make_way(out, "the imported run")
    assert "out.part: left by a command that was killed; removed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, by: signal.Signals) -> None:
    assert killed(tmp_path / "out", by) == 128 + by
    assert list(tmp_path.iterdir()) == []


def test_a_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        appearing_whole(out),
        pytest.raises(ConfigError, match=r"out\.part: another command is writing the export there"),
    ):
        make_way(out, "the export")
    out.rmdir()
    (tmp_path / "out.part").mkdir()
    with pytest.raises(ConfigError, match=r"out\.part: already exists and was not created by calm-scale"):
        make_way(out, "the export")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    make_way(tmp_path / "new", "the export")
    make_way(tmp_path, "the export")
    (tmp_path / "a").write_text("1")
    with pytest.raises(ConfigError, match="is not empty; give the export a folder of its own"):
        make_way(tmp_path, "the export")
    with pytest.raises(ConfigError, match="is a file"):
        make_way(tmp_path / "a", "the export")


def test_an_export_never_goes_into_a_checkpoint_or_replaces_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "step_00000002"
    checkpoint.mkdir()
    (checkpoint / "card.json").touch()
    with pytest.raises(ConfigError, match="a checkpoint or an export; choose a folder elsewhere"):
        make_way(checkpoint / "deep" / "out", "the export")
    with pytest.raises(ConfigError, match="is not empty"):
        make_way(checkpoint, "the export")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="is the current folder"):
        make_way(Path(), "the export")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    make_way(tmp_path / "link", "the export")
    with appearing_whole(tmp_path / "link") as partial:
        (partial / "file").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").is_file()
