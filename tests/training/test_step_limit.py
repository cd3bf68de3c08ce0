"""The time limit of a step follows the steps before it."""

from __future__ import annotations

import pytest

from calm_scale.training.stall import SHORTEST_SECONDS, STEPS_MEASURED, TIMES_THE_SLOWEST, StepLimit


@pytest.mark.parametrize(("slowest", "limit"), [(0.3, SHORTEST_SECONDS), (40.0, TIMES_THE_SLOWEST * 40)])
def test_it_is_a_multiple_of_the_slowest_step_and_never_short(slowest: float, limit: float) -> None:
    step_limit = StepLimit()
    for step in range(STEPS_MEASURED):
        assert step_limit.seconds is None
        step_limit.add(slowest if step == 3 else slowest / 2)
    assert step_limit.seconds == limit
