"""The line after a generation says what was not drawn as asked."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from calm_scale.config import ConfigError, RunConfig
from calm_scale.sampling.generate import Completion, Generation
from calm_scale.stages.evaluate import run_evaluation
from calm_scale.stages.texts import _say_speed, _write_lines, run_generation


def _done(*heads: Any, fallbacks: int = 0) -> Generation:
    completions = tuple(Completion(i, "", (1,), "length", 3, 0, head) for i, head in enumerate(heads))
    return Generation(
        completions, "Algorithm 1", {"other": 1.0}, 1, 1, 7, fallbacks, "by Algorithm 2, N = 7 or more"
    )


def test_how_heads_were_completed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _say_speed(_done("agreed", "none", "forced", fallbacks=1))
    said = capsys.readouterr().err
    assert "1 fall-back; 2 heads by Algorithm 2, N = 7 or more (1 forced: no draw agreed)" in said
    _say_speed(_done("none"))
    assert "head" not in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_beside_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "lines.jsonl"
    _write_lines(_done("none"), ["a"], out)
    before = out.read_bytes()
    assert json.loads(before)["prompt"] == "a"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _write_lines(_done("none", "none"), ["a", "b"], out)
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]
    assert out.read_bytes() == before


def test_a_budget_too_small_for_a_round_is_told_before_anything_is_opened(tmp_path: Path) -> None:
    """The folder is empty: whatever looked for a tokenizer, data or a checkpoint would complain of that."""
    tight = {"algorithm": "exact", "temperature": 0.5, "draw_budget": 1}
    run = RunConfig.model_validate(
        {"name": "run", "workdir": tmp_path / "run", "generation": tight, "evaluation": tight}
    )
    with pytest.raises(ConfigError, match="draw_budget 1 is below the 2 draws"):
        run_generation(run, prompts=["a"])
    with pytest.raises(ConfigError, match="draw_budget 1 is below the 2 draws"):
        run_evaluation(run)
