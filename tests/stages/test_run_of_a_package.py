"""A head and a schedule of a user's package go through training, resume, evaluation, generation and the reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from calm_scale.record.metrics import read_metrics

pytestmark = pytest.mark.ranks
TinyRun = Any  # the class stands in this folder's conftest
PACKAGE = Path(__file__).parents[1] / "extensions"


@pytest.fixture(scope="module")
def package() -> Iterator[None]:
    """The package is where processes find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGE))
        yield


@pytest.fixture(scope="module")
def mmd(package: None, trained: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A language model with the package's head: 4 steps under TP 2, then 2 under PP 2."""
    folder = tmp_path_factory.mktemp("mmd")
    document = yaml.safe_load(trained.document.read_text(encoding="utf-8"))
    document["workdir"] = str(folder / "run")
    document["data"] = str(trained.folder / "data")
    document["lm"]["autoencoder"] = str(trained.folder / "autoencoder" / "export")
    document["lm"]["head"] = {"kind": "some_package:MmdHead", "num_samples": 3}
    document["lm"]["training"]["optimizer"]["schedule"] |= {"kind": "some_package:inverse_root"}
    path = folder / "mmd.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    run = type(trained)(path, folder / "run")
    run.start("train-lm", str(path), "--set", "lm.training.steps=4", "--set", "lm.parallel.tensor=2")
    run.results["resumed"] = run.start(
        *("train-lm", str(path), "--set", "lm.parallel.pipeline=2", "--accept", "lm.training.steps")
    )
    return run


def test_training_goes_on_in_another_layout_at_the_rates_of_the_package(mmd: TinyRun) -> None:
    assert "resumed at step 4" in mmd.results["resumed"].err
    rows = read_metrics(mmd.folder / "lm" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["lr"] for row in rows][2:] == pytest.approx([2e-3 * (2 / s) ** 0.5 for s in (3, 4, 5, 6)])
    assert all(0 < row["loss"] < 2 for row in rows)


def test_a_resume_with_another_setting_of_the_head_is_refused_by_name(mmd: TinyRun) -> None:
    done = mmd.start("train-lm", str(mmd.document), "--set", "lm.head.num_samples=5", expect=2)
    assert "lm.head.num_samples" in done.err and "Traceback" not in done.err


def test_it_is_evaluated_and_generates(mmd: TinyRun, tmp_path: Path) -> None:
    mmd.start("eval", str(mmd.document), "--json", str(tmp_path / "eval.json"))
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["protocol"]["provenance"]["step"] == "6" and result["score"]["num_documents"] > 0
    mmd.start("generate", str(mmd.document), "--prompt", "def ", "--out", str(tmp_path / "text"))
    row = json.loads((tmp_path / "text").read_text())
    assert row["prompt"] == "def " and len(row["token_ids"]) > 0


def test_the_reports_count_it(mmd: TinyRun, tmp_path: Path) -> None:
    name = str(mmd.document)
    mmd.start("flops", name, "--json", str(tmp_path / "flops.json"))
    rows = [row for row in rows_in(json.loads((tmp_path / "flops.json").read_text())) if "component" in row]
    mix = next(row for row in rows if row["component"] == "head.mix")
    assert mix["parameters"] == 2 * 32 * 32 + 32
    assert mix["forward"] == 3 * 2 * 32 * 32 and mix["backward"] == 2 * mix["forward"]
    kept = []
    for samples in (3, 6):
        options = ["--set", f"lm.head.num_samples={samples}", "--nodes", "1", "--gpus-per-node", "2"]
        mmd.start("plan", name, *options, "--json", str(tmp_path / "plan.json"))
        found = [
            row
            for row in rows_in(json.loads((tmp_path / "plan.json").read_text()))
            if "output" in row and "activations" in row
        ]
        kept.append(sum(row["output"] for row in found))
    assert kept[1] > kept[0] > 0


def rows_in(value: Any) -> list[dict[str, Any]]:
    """Every object of a JSON document."""
    if isinstance(value, list):
        return [row for part in value for row in rows_in(part)]
    return [value, *rows_in(list(value.values()))] if isinstance(value, dict) else []
