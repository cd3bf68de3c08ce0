"""A learning-rate schedule of a user's package, named in the document."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from calm_scale.config.training import OptimizerConfig, ScheduleConfig
from calm_scale.training.schedule import learning_rate

PACKAGE = "def inverse_root(optimizer, step, total_steps):\n    return optimizer.lr * (4 / step) ** 0.5\n"


def test_a_function_gives_the_rate_after_the_warm_up(tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    schedule = ScheduleConfig(kind="my_schedules:inverse_root", warmup_steps=4)
    config = OptimizerConfig(lr=1.0, schedule=schedule)
    assert [learning_rate(config, step, 100) for step in (2, 4, 16)] == [0.5, 1.0, 0.5]
    with pytest.raises(ValidationError, match="absent"):
        ScheduleConfig(kind="my_schedules:absent")
