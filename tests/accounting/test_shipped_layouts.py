"""The layouts in configs/layouts against the search that chose them."""

from __future__ import annotations

from pathlib import Path

import pytest

from calm_scale.accounting import hardware
from calm_scale.accounting.layout_search import rank
from calm_scale.accounting.step_time import estimated_step
from calm_scale.config import load
from calm_scale.config.run_folder import Stage

LAYOUTS = Path(__file__).parents[2] / "configs" / "layouts"
MODELS = ("calm-m", "calm-l", "calm-xl", "transformer-s", "transformer-m", "transformer-l")
SEARCHED = ("calm-m-8", "calm-xl-8", "calm-xl-64", "calm-xl-128")


@pytest.mark.parametrize("name", [f"{model}-{gpus}" for model in MODELS for gpus in (8, 64, 128)])
def test_it_uses_its_gpus_and_spreads_the_batch(name: str) -> None:
    run = load(LAYOUTS / f"{name}.yaml")
    stage, gpus = run.require_lm(), int(name.rpartition("-")[2])
    assert stage.parallel.data_parallel(gpus) == stage.parallel.data
    assert stage.micro_batches(stage.parallel.data) >= 1


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_nothing_faster(name: str) -> None:
    run = load(LAYOUTS / f"{name}.yaml")
    gpus, chip = int(name.rpartition("-")[2]), hardware.device("h100")
    best = rank(run, gpus // 8, chip, gpus_per_node=8)[0]
    assert best.fits
    own = estimated_step(run, Stage.LM, gpus, gpus // 8, chip)
    assert own == pytest.approx(best.time.total, rel=1e-6)
