"""What is accepted but hardly meant is stated before the run, each in one line with its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import RunConfig, load
from calm_scale.config.run import notes, tokens_per_step

REPO = Path(__file__).resolve().parents[2]
BACKBONE = {"num_layers": 2, "hidden_size": 16, "ffn_size": 32, "num_heads": 2, "positions": 4}


def run(schedule: dict[str, Any], steps: int = 100, **head: Any) -> RunConfig:
    training = {"steps": steps, "global_batch": 1, "optimizer": {"schedule": schedule}}
    lm = {"backbone": BACKBONE, "training": training, "head": {"kind": "energy", **head}}
    return RunConfig.model_validate({"name": "r", "autoencoder": {"training": training}, "lm": lm})


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"warmup_steps": 10}, []),
        ({"warmup_steps": 99}, []),
        ({"warmup_steps": 100}, ["warmup_steps: the rate warms up over 100 steps, but the run has 100"]),
        ({"kind": "cosine", "warmup_steps": 101}, ["warmup_steps: the rate warms up over 101 steps"]),
        ({"kind": "wsd", "warmup_steps": 40, "decay_steps": 60}, []),
        (
            {"kind": "wsd", "warmup_steps": 50, "decay_steps": 300},
            ["decay_steps: warm-up (50 steps) and decay (300) are longer than the run (100)", "at most 50"],
        ),
        ({"kind": "wsd", "warmup_steps": 100, "decay_steps": 1}, ["never reaches", "shorten both"]),
        ({"warmup_steps": 1, "decay_steps": 5}, ["decay_steps: 5 is not used, kind constant"]),
        (
            {"kind": "cosine", "warmup_steps": 1, "decay_steps": 5},
            ["decay_steps: 5 is not used, kind cosine"],
        ),
        ({"warmup_steps": 1, "min_lr_ratio": 0.1}, ["min_lr_ratio: 0.1 is not used"]),
        ({"kind": "cosine", "warmup_steps": 1, "min_lr_ratio": 1}, ["kind cosine does not decay"]),
    ],
)
def test_a_schedule_that_the_run_does_not_follow_is_stated(schedule: dict[str, Any], said: list[str]) -> None:
    for stage in ("autoencoder", "lm"):
        lines = notes(run(schedule), stage)  # type: ignore[arg-type]
        assert all(line.startswith(f"{stage}.training.optimizer.schedule.") for line in lines)
        assert bool(lines) == bool(said)
        assert all(words in "\n".join(lines) for words in said), lines


def test_alpha_2_is_accepted_and_stated() -> None:
    warm = {"warmup_steps": 1}
    assert notes(run(warm, alpha=1.99)) == []
    (line,) = notes(run(warm, alpha=2))
    assert line.startswith("lm.head.alpha: at 2 the energy score is not strictly proper")


def test_notes_are_shown_by_every_command_that_looks_before_a_run(tmp_path: Path) -> None:
    path, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    path.write_text(
        f"workdir: {tmp_path}/run\nvocab_size: 64\nautoencoder: {{training: {{steps: 5, global_batch: 1}}}}\n"
        f"lm:\n  backbone: {BACKBONE}\n  training: {{steps: 5, global_batch: 1}}\n  head: {{kind: energy, alpha: 2}}\n"
    )
    cluster.write_text("cpus_per_node: 1\n")
    commands = (
        (["config", "validate"], ("autoencoder", "lm"), True),
        (["train-ae", "--dry-run"], ("autoencoder",), False),
        (["train-lm", "--dry-run"], ("lm",), True),
        (["submit", "--dry-run", "--cluster", str(cluster)], ("autoencoder", "lm"), True),
        (
            ["submit", "--dry-run", "--cluster", str(cluster), "--sweep", "seed=1,2"],
            ("autoencoder", "lm"),
            True,
        ),
    )
    for words, stages, has_head in commands:
        done = CliRunner().invoke(app, [*words, str(path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found = {line for line in done.output.splitlines() if line.startswith("note: ")}
        warm_ups = {line.split(".")[0].removeprefix("note: ") for line in found if "warms up" in line}
        assert (warm_ups, any("strictly proper" in line for line in found)) == (set(stages), has_head), words


@pytest.mark.parametrize("name", ["calm-l-k1", "calm-l-k2", "calm-l", "calm-l-k8", "transformer-l"])
def test_the_models_of_one_figure_train_on_the_same_tokens_a_step(name: str) -> None:
    config = load(REPO / f"configs/runs/{name}.yaml")
    assert tokens_per_step(config, "lm") == 2048 * 1024
    assert config.autoencoder is None or tokens_per_step(config, "autoencoder") == 512 * 1024
    assert config.lm is not None and config.lm.backbone == load(REPO / "configs/lm/calm-l.yaml").lm.backbone  # type: ignore[union-attr]


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("[!c]*/**/*.yaml")), ids=lambda p: p.stem)
def test_nothing_is_to_be_noted_of_what_is_shipped(path: Path) -> None:
    assert notes(load(path)) == []
