"""A benchmark prints a figure only where its rounds agree: other load on the machine cannot make it print nonsense."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "_measure.py"
    spec = importlib.util.spec_from_file_location("_measure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rounds_that_agree_give_their_median_and_quartiles(measure: ModuleType) -> None:
    text = measure.ratio_text("speedup", [8.8, 8.7, 9.1, 8.9, 8.6])
    assert text.splitlines()[0] == "speedup: 8.80"
    assert "quartiles 8.70 to 8.90 over 5 rounds" in text


@pytest.mark.parametrize(
    "of_rounds",
    [
        [8.8, 4.1, 8.9, 5.0, 8.7],  # another process beside some rounds
        [-3.0, -2.9, -3.1],  # a start-up longer than the work it is subtracted from
        [math.inf, 2.0, 2.1],
        [math.inf] * 3,
    ],
)
def test_rounds_that_do_not_agree_give_no_number(measure: ModuleType, of_rounds: list[float]) -> None:
    text = measure.ratio_text("prep_vs_fastest", of_rounds)
    assert text.startswith("prep_vs_fastest: too noisy (")
    with pytest.raises(ValueError):
        float(text.split(": ")[1])


def test_a_difference_that_is_not_positive_is_no_ratio(measure: ModuleType) -> None:
    assert measure.ratios([1.0, 2.0], [0.5, -0.1]) == [2.0, math.inf]


def test_load_that_meets_both_sides_of_each_round_cancels(measure: ModuleType) -> None:
    """Rounds slowed by up to four times: paired ratios stay at 2, ratios of two medians of unpaired rounds do not."""
    slow = [random.Random(0).uniform(1, 4) for _ in range(9)]
    paired = measure.ratios([2 * s for s in slow], slow)
    assert measure.ratio_text("x", paired).splitlines()[0] == "x: 2.00"
