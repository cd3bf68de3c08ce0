"""Learning rates by hand."""

from __future__ import annotations

import pytest

from calm_scale.config.training import OptimizerConfig
from calm_scale.training.schedule import learning_rate


def rates(schedule: dict[str, object], steps: list[int], total: int = 100) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "schedule": schedule})
    return [learning_rate(config, step, total) for step in steps]


def test_warm_up_then_constant() -> None:
    assert rates({"warmup_steps": 10}, [1, 5, 10, 11, 100]) == pytest.approx([0.1, 0.5, 1, 1, 1])


def test_no_warm_up_starts_at_full_rate() -> None:
    assert rates({"warmup_steps": 0}, [1, 2]) == [1.0, 1.0]


def test_cosine_ends_at_its_floor() -> None:
    schedule = {"kind": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1}
    assert rates(schedule, [10, 20, 60, 100, 120]) == pytest.approx([0.5, 1, 0.55, 0.1, 0.1])


def test_wsd_decays_at_the_end() -> None:
    schedule = {"kind": "wsd", "warmup_steps": 10, "decay_steps": 20, "min_lr_ratio": 0.0}
    assert rates(schedule, [10, 80, 90, 100]) == pytest.approx([1, 1, 0.5, 0])
