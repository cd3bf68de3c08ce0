"""The line after a generation says what was not drawn as asked."""

from __future__ import annotations

from typing import Any

import pytest

from calm_scale.sampling.generate import Completion, Generation
from calm_scale.stages.generate import _say_speed


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
