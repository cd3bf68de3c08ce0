"""The command line starts fast, speaks clearly and exits with codes that scripts can trust."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
COMMANDS = [
    "prep",
    "train-ae",
    "train-lm",
    "eval",
    "generate",
    "flops",
    "plan",
    "submit",
    "status",
    "ckpt",
    "config",
    "demo",
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "calm_scale", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
        check=False,
    )


def words_of(text: str) -> str:
    """What a boxed, wrapped message says, however long this checkout's path made its lines."""
    return " ".join(text.replace("│", " ").split())


def test_help_lists_every_command_without_importing_torch() -> None:
    probe = (
        "import sys; sys.argv = ['calm-scale', '--help']\n"
        "from calm_scale.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'deepspeed', 'megatron', 'datasets'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HEAVY []" in done.stdout
    for command in COMMANDS:
        assert f"│ {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    if command not in {"ckpt", "config"}:
        assert "Example" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train-lm", "nowhere.yaml"], "nowhere.yaml: cannot read the configuration"),
        (
            ["config", "show", "configs/lm/calm-m.yaml", "--set", "lm.parallel.tensr=2"],
            "did you mean `tensor`?",
        ),
        (["train-ae", "configs/lm/transformer-s.yaml"], "autoencoder"),
        (["flops"], "Missing argument"),
        (["nonsense"], "No such command"),
        (["plan", "configs/lm/calm-m.yaml", "--gpu", "abacus"], "gpu 'abacus' is not in the table"),
        (["ckpt", "verify", "docs"], "docs is not a checkpoint"),
        (["flops", "configs/lm/calm-m.yaml", "--html", "docs"], "docs is a folder; name a file"),
        (["plan", "configs/lm/calm-m.yaml", "--json", "README.md/a/b.json"], "README.md is a"),
        (["generate", "configs/lm/calm-m.yaml", "--out", "/proc/1/new/out.jsonl"], "'--out'"),
    ],
)
def test_a_users_mistake_is_a_message_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in words_of(done.stderr)
    assert "Traceback" not in done.stderr


def test_validate_says_what_it_checked() -> None:
    done = run("config", "validate", "configs/runs/calm-xl.yaml")
    assert done.returncode == 0
    assert "valid · run calm-xl" in done.stdout


def test_a_file_that_cannot_be_used_is_a_message_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"extends: {REPO}/configs/lm/calm-m.yaml", encoding="utf-8")
    (tmp_path / "lm" / "ledger.jsonl").mkdir(parents=True)
    done = run("status", str(tmp_path))
    assert done.returncode == 1
    assert "ledger.jsonl: Is a directory" in words_of(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_a_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from calm_scale.cli import app as program

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(program, "app", full)
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == 1
    assert (
        capsys.readouterr().err == "error: no space left on the disk; free some and run the command again\n"
    )
