"""benchmarks/figures.py: what was asked for is checked before anything is computed, and said without a traceback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.evaluation.curves import CurvePoint

ROOT = Path(__file__).parents[2]
CALM, AR = (str(ROOT / "configs" / "small" / name) for name in ("energy.yaml", "baseline.yaml"))


@pytest.fixture
def figures(monkeypatch):
    """The program, with data there, two complete checkpoints a run, and no models: opening one fails the test."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "open_split", lambda *_, **__: SimpleNamespace(manifest=None))
    entries = [
        SimpleNamespace(step=step, state=state)
        for step, state in ((1, "complete"), (2, "damaged"), (3, "complete"))
    ]
    monkeypatch.setattr(module, "inventory", lambda _: entries)
    monkeypatch.setattr(module, "open_model", lambda *_: pytest.fail("a model was opened"))
    monkeypatch.setattr(module, "init_world", lambda: None)
    return module


def run(figures, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["figures.py", *arguments])
    code = figures.main()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["temperature", "nope.yaml"], "nope.yaml"),
        (["temperature", CALM, "--set", "evaluation.max_sequences=x"], "evaluation.max_sequences"),
        (["temperature", CALM, "--baseline", "nope.yaml"], "nope.yaml"),
        (["temperature", CALM, "--baseline", CALM], "--baseline needs an autoregressive run"),
        (["temperature", CALM, AR], "temperature traces one run, 2 are named"),
        (["cross-entropy", AR, CALM], "cross-entropy needs an autoregressive run (head softmax), energy has"),
        (["cross-entropy", AR], "at least 3 complete checkpoints"),
        (["cross-entropy", AR, "--baseline", AR], "takes no --baseline"),
    ],
)
def test_a_mistake_is_told_before_anything_is_computed(
    figures, monkeypatch, capsys, tmp_path, arguments, said
):
    code, text = run(figures, monkeypatch, capsys, *arguments, "--out", str(tmp_path / "out"))
    assert code == 2
    assert text.startswith("error: ")
    assert said in text
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_of_the_results_is_told_first(figures, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    for out in ("file", "file/inside"):
        code, text = run(figures, monkeypatch, capsys, "temperature", CALM, "--out", str(tmp_path / out))
        assert code == 2
        assert f"--out {tmp_path / out}: no folder can be made there" in text


@pytest.mark.parametrize("figure", ["temperature", "cross-entropy"])
def test_a_run_without_checkpoints_is_told(figures, monkeypatch, capsys, tmp_path, figure):
    monkeypatch.setattr(figures, "inventory", lambda _: [])
    code, text = run(figures, monkeypatch, capsys, figure, AR, "--out", str(tmp_path / "out"))
    assert code == 2
    assert "complete checkpoint" in text
    assert "baseline/lm" in text


def test_the_point_of_both_series_is_computed_once(figures, monkeypatch, capsys, tmp_path):
    asked = []

    def points(config, models):
        asked.extend((model.temperature, model.num_candidates) for _, model in models)
        return [CurvePoint(label, len(asked), 0.0, None) for label, _ in models]

    model = SimpleNamespace(patch_size=2, vocab_size=9, device=None)
    monkeypatch.setattr(figures, "open_model", lambda *_: SimpleNamespace(model=model))
    monkeypatch.setattr(figures, "points", points)
    code, text = run(figures, monkeypatch, capsys, "temperature", CALM, "--out", str(tmp_path / "out"))
    assert (code, text) == (0, "")
    assert len(asked) == len(set(asked)) == 10
    over_n, over_t = json.loads((tmp_path / "out" / "temperature.json").read_text()).values()
    assert [p["label"] for p in over_t] == ["T 1/2", "T 1/3", "T 1/4", "T 1/5", "T 1/6"]
    assert over_t[1] == {**over_n[-1], "label": "T 1/3"}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["temperature.json", "temperature.png"]
