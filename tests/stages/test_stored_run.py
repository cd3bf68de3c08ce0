"""A run of an earlier version is resumed, evaluated and accounted for with the numbers it had then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calm_scale.record.metrics import read_metrics

pytestmark = pytest.mark.ranks
STORED = Path(__file__).with_name("stored_run")
ROUNDING = 1e-5
"""Relative. Three fp32 steps on another processor differ by about 1e-6; on the same one they are bitwise equal."""


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((STORED / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored run, in a folder of its own; its document names everything relative to that folder."""
    return Path(shutil.copytree(STORED, tmp_path_factory.mktemp("stored") / "copy"))


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "calm_scale", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def _assert_steps(metrics: Path, expected: list[dict[str, float]]) -> None:
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, then in zip(rows, expected, strict=True):
        assert {key: row[key] for key in then} == pytest.approx(then, rel=ROUNDING)


def test_its_shards_verify(stored: Path) -> None:
    for split in ("train", "heldout"):
        _run(stored, "prep", "verify", f"run/data/{split}")


def test_its_autoencoder_goes_on(stored: Path, expected: dict[str, Any]) -> None:
    said = _run(stored, "train-ae", "tiny.yaml")
    assert "resumed at step 600" in said
    _assert_steps(stored / "run" / "autoencoder" / "metrics.jsonl", expected["autoencoder"])


def test_its_language_model_goes_on_and_scores_as_before(stored: Path, expected: dict[str, Any]) -> None:
    said = _run(stored, "train-lm", "tiny.yaml")
    assert "resumed at step 200" in said
    _assert_steps(stored / "run" / "lm" / "metrics.jsonl", expected["lm"])
    _run(stored, "eval", "tiny.yaml", "--json", "score.json")
    now, then = json.loads((stored / "score.json").read_text(encoding="utf-8"))["score"], expected["score"]
    for key in ("num_positions", "num_documents", "num_samples", "brierlm"):
        assert now[key] == then[key]
    for key in ("components", "accuracy", "collision"):
        # 372 positions of 8 samples: one draw that rounding decides the other way moves a figure by less than 1e-3
        assert now[key] == pytest.approx(then[key], abs=1e-3)


def test_its_flops_are_counted_as_before(stored: Path, expected: dict[str, Any]) -> None:
    _run(stored, "flops", "tiny.yaml", "--json", "flops.json")
    report = json.loads((stored / "flops.json").read_text(encoding="utf-8"))
    tables = report["sections"]["components.first-house"]["tables"]
    for name, rows in expected["flops"].items():
        assert tables[name]["rows"] == rows
