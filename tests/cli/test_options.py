"""Options of the commands that run a model, as overrides of the document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from calm_scale.cli import scoring, train
from calm_scale.cli.app import app
from calm_scale.config import RunConfig
from calm_scale.config.run_folder import Stage
from calm_scale.config.training import ProfileConfig

REPO = Path(__file__).resolve().parents[2]


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


def test_profile_chooses_steps_unless_the_document_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from calm_scale.stages import launch

    seen: list[object] = []

    def note(run: RunConfig, stage: Stage) -> int:
        seen.append(run.require_stage(stage).training.profile)
        raise typer.Exit(7)

    monkeypatch.setattr(launch, "default_ranks", note)
    document = str(REPO / "configs" / "runs" / "calm-xl.yaml")
    chosen = "lm.training.profile.steps=5"
    for asked in (["train-lm"], ["train-lm", "--profile"], ["train-ae", "--profile"]):
        assert CliRunner().invoke(app, [asked[0], document, *asked[1:]]).exit_code == 7
    assert CliRunner().invoke(app, ["train-lm", document, "--profile", "--set", chosen]).exit_code == 7
    assert seen == [None, ProfileConfig(), ProfileConfig(), ProfileConfig(steps=5)]
