"""When a training command starts ranks itself, and how many."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from calm_scale.config import ConfigError, load
from calm_scale.config.run_folder import Stage
from calm_scale.stages import launch as stage_launch

REPO = Path(__file__).resolve().parents[2]
CLEAN = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_PROCID")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    ranks: list[int] = []
    monkeypatch.setattr(stage_launch, "launch", lambda argv, nproc, **_: ranks.append(nproc) or 0)
    return ranks


def test_a_bare_command_starts_the_ranks_of_its_layout(started: list[int]) -> None:
    assert stage_launch.spawn_if_needed(4) == 0
    assert started == [4]


def test_one_rank_runs_in_this_process(started: list[int]) -> None:
    assert stage_launch.spawn_if_needed(1) is None
    assert started == []


def test_a_rank_of_a_launcher_never_starts_more(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }.items():
        monkeypatch.setenv(name, value)
    assert stage_launch.spawn_if_needed(2) is None
    assert started == []


@pytest.mark.parametrize(
    ("preset", "stage", "ranks"),
    [("calm-xl", Stage.LM, 4), ("calm-xl", Stage.AUTOENCODER, 1), ("calm-m", Stage.LM, 1)],
)
def test_ranks_follow_from_the_layout(preset: str, stage: Stage, ranks: int) -> None:
    assert stage_launch.default_ranks(load(REPO / f"configs/runs/{preset}.yaml"), stage) == ranks


def test_a_missing_section_is_named(started: list[int]) -> None:
    with pytest.raises(ConfigError, match="no `autoencoder` section"):
        stage_launch.default_ranks(load(REPO / "configs/lm/transformer-s.yaml"), Stage.AUTOENCODER)


def test_a_module_in_the_users_folder_hides_no_library(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    done = subprocess.run(stage_launch.this_program("--help"), cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
