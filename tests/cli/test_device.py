"""`--device` of the commands that run a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from calm_scale.cli import scoring, train
from calm_scale.cli.app import app


@pytest.mark.parametrize("command", ["train-ae", "train-lm", "eval", "generate", "score --text a"])
def test_the_option_is_the_last_override(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def load(_: Path, overrides: Sequence[str]) -> None:
        seen.append(list(overrides))
        raise typer.Exit(7)

    monkeypatch.setattr(train, "load", load)
    monkeypatch.setattr(scoring, "load", load)
    name, *rest = command.split()
    asked = [name, "run.yaml", *rest, "--set", "device=cuda"]
    assert CliRunner().invoke(app, asked).exit_code == 7
    assert CliRunner().invoke(app, [*asked, "--device", "cpu"]).exit_code == 7
    assert seen == [["device=cuda"], ["device=cuda", "device=cpu"]]
    assert CliRunner().invoke(app, [name, "run.yaml", *rest, "--device", "tpu"]).exit_code == 2
