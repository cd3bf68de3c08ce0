"""`checkpoint.interval: auto`: Daly's optimum from what is known before the run, within limits, said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calm_scale.accounting import layout_search, saves
from calm_scale.accounting.hardware import device
from calm_scale.accounting.report.plan_sections import plan_document
from calm_scale.accounting.report.render import to_markdown
from calm_scale.config import ConfigError, RunConfig, load
from calm_scale.config.training import UNESTIMATED_STEPS, CheckpointConfig
from calm_scale.stages.plan.dry_run import save_notes

XL = Path(__file__).parents[2] / "configs" / "runs" / "calm-xl.yaml"


def xl(*overrides: str) -> RunConfig:
    return load(XL, ["lm.parallel.data=16", *overrides])


def at(config: RunConfig, nodes: int = 8) -> saves.SaveInterval:
    return saves.save_interval(config, "lm", ranks=64, nodes=nodes, chip=device("h100"))


def test_automatic_interval_is_dalys() -> None:
    found = at(xl())
    expected = saves.optimal_interval(found.save_seconds, saves.job_mtbf(8))
    assert found.limit == ""
    assert found.interval_seconds == pytest.approx(expected, abs=found.step_seconds)
    often = at(xl("lm.training.checkpoint.node_mtbf_hours=500"))
    assert often.steps == pytest.approx(found.steps * (500 / 6334) ** 0.5, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said", "seconds"),
    [
        ("lm.training.checkpoint.node_mtbf_hours=0.5", "not under 60 s", saves.MIN_SECONDS),
        ("lm.training.checkpoint.node_mtbf_hours=1e9", "not over 4 h", saves.MAX_SECONDS),
        ("lm.training.steps=1000", "at least 10 saves", None),
    ],
)
def test_limits_are_named(change: str, said: str, seconds: float | None) -> None:
    longer = () if "steps" in change else ("lm.training.steps=10000000",)
    found = at(xl(change, *longer))
    assert said in found.reason
    if seconds is None:
        assert found.steps == 100
    else:
        assert found.interval_seconds == pytest.approx(seconds, abs=found.step_seconds)


def test_a_run_uses_the_number_that_the_plan_says() -> None:
    best = layout_search.rank(load(XL), 8, device("h100"))[0]
    resolved = saves.with_interval(best.config, "lm", ranks=64, nodes=8, chip=device("h100"))
    steps = resolved.lm.training.checkpoint.interval if resolved.lm else None
    assert isinstance(steps, int)
    assert f"every {steps:,} steps" in to_markdown(plan_document(load(XL), 8, device("h100")))
    # Resolving again, as a resumed run does from its stored document, changes nothing.
    assert saves.with_interval(resolved, "lm", ranks=8, nodes=1, chip=None) == resolved


def test_unknown_devices_and_numbers_of_ones_own() -> None:
    unknown = saves.with_interval(xl(), "lm", ranks=64, nodes=8, chip=None)
    assert unknown.lm is not None
    assert unknown.lm.training.checkpoint.interval == UNESTIMATED_STEPS
    set_ = xl("lm.training.checkpoint.interval=77")
    assert "every 77 steps (set by" in saves.interval_text(set_, "lm", ranks=64, nodes=8, chip=device("h100"))
    assert [note.split(".")[0] for note in save_notes(set_)] == ["autoencoder"]


def test_kept_steps_are_saved_whatever_the_interval() -> None:
    config = CheckpointConfig(interval=7, keep_every=10)
    assert [step for step in range(1, 22) if config.is_due(step)] == [7, 10, 14, 20, 21]


STEPS = "steps between saves, 1 or more, or `auto`"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, STEPS),
        (-1, STEPS),
        ("often", STEPS),
        (2.5, STEPS),
        (True, "should be a number, not the truth value `true`"),
    ],
)
def test_other_intervals_are_refused_once(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.interval`: " + message) as error:
        xl(f"lm.training.checkpoint.interval={value}")
    assert len(str(error.value).splitlines()) == 1
