"""The estimate of a step's time: against measured products and collectives, and against published runs it never saw."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from calm_scale.accounting import hardware, layout_search, step_time
from calm_scale.accounting.compared_models import paper_model
from calm_scale.accounting.components import linear
from calm_scale.accounting.kernels import FUSED, OURS, OURS_PLAIN, Share, product_seconds, rates
from calm_scale.accounting.report.build import Subject, build
from calm_scale.accounting.report.plan_sections import plan_document
from calm_scale.accounting.report.render import to_markdown
from calm_scale.accounting.step_time import ring
from calm_scale.config import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    """The benchmark that reads the published rows."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(
            "plan_accuracy", ROOT / "benchmarks" / "plan_accuracy.py"
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules["plan_accuracy"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_families_no_constant_was_fitted_to_are_predicted(accuracy: ModuleType) -> None:
    held_out = [
        row for row in accuracy.read_rows(accuracy.DATA) if row.family not in accuracy.TRAINING_FAMILIES
    ]
    found = accuracy.figures(held_out, {row.id: row.predict().total for row in held_out})
    assert found["rows"] >= 20
    assert found["mfu_error_median"] <= 0.10
    assert found["mfu_error_p90"] <= 0.25


def test_layouts_of_a_published_family_are_ranked(accuracy: ModuleType) -> None:
    rows = accuracy.read_rows(accuracy.DATA)
    found = accuracy.figures(rows, {row.id: row.predict().total for row in rows})
    assert found["pairs"] >= 40
    assert found["ranking"] >= 0.90


@pytest.mark.parametrize(
    ("gpu", "size", "measured"),
    [("a100", 4096, 228.0e12), ("a100", 8192, 253.7e12), ("h100", 4096, 716e12), ("h100", 8192, 795e12)],
)
def test_a_square_product_takes_what_libraries_measure(gpu: str, size: int, measured: float) -> None:
    """Measured in a loop of its own; a whole step heats the device and lowers its clock by up to a quarter."""
    component = replace(linear("x", "backbone", size, size), backward=0)
    at = rates(hardware.device(gpu), FUSED)
    seconds = product_seconds(component, Share(size, 2), size, 1, False, at)
    assert 0.75 * measured < 2 * size**3 / seconds < 1.05 * measured


def test_short_inner_dimensions_are_slower_as_measured() -> None:
    """8192 × 8192 × K on an H800: 386 TFLOP/s at K 256, 628 at 1024, 736 at 4096 (of 766 at 16384)."""
    at = rates(replace(hardware.device("h100"), products=766 / 989.5), FUSED)
    for inner, measured in ((256, 386), (1024, 628), (4096, 736)):
        component = replace(linear("x", "backbone", inner, 8192), backward=0)
        seconds = product_seconds(component, Share(8192, 2), 8192, 1, False, at)
        assert 2 * 8192**2 * inner / seconds / 1e12 == pytest.approx(measured, rel=0.12)


def test_a_group_uses_the_ports_of_all_its_ranks_on_a_node() -> None:
    h100 = hardware.device("h100")
    one_a_node, four_a_node, all_eight = (ring(64 // stride, stride, h100, 8) for stride in (8, 2, 1))
    assert one_a_node.bandwidth == pytest.approx(0.93 * 50e9)
    assert four_a_node.bandwidth == pytest.approx(4 * one_a_node.bandwidth)
    assert all_eight.bandwidth == pytest.approx(0.8 * 450e9)  # the link inside a node is now the limit
    assert {r.nodes for r in (one_a_node, four_a_node, all_eight)} == {8}
    assert ring(8, 1, h100, 8).nodes == 1


def test_calls_across_more_nodes_cost_more() -> None:
    h100 = hardware.device("h100")
    costs = [ring(8 * nodes, 1, h100, 8).call_seconds for nodes in (1, 2, 16)]
    assert costs == sorted(costs)
    assert costs[2] - costs[0] == pytest.approx(235e-6, rel=0.05)


def test_xl_is_data_parallel_up_to_32_nodes() -> None:
    for nodes in (1, 2, 8, 32):
        best = layout_search.rank(paper_model("CALM-XL"), nodes, hardware.device("h100"))[
            0
        ].config.require_lm()
        assert (best.parallel.tensor, best.parallel.pipeline) == (1, 1), nodes


def test_parts_add_up_and_larger_micro_batches_cost_less_a_step() -> None:
    config = paper_model("CALM-XL")
    found = []
    for micro_batch in (1, 2, 4):
        training = config.require_lm().training.model_copy(update={"micro_batch": micro_batch})
        lm = config.require_lm().model_copy(update={"training": training})
        time = step_time.step_time(config.model_copy(update={"lm": lm}), 64, hardware.device("h100"), 8)
        assert time.total == pytest.approx(sum(time.parts.values()))
        found.append(time.total)
    assert found == sorted(found, reverse=True)


def test_deterministic_kernels_cost_time_in_attention_and_are_named() -> None:
    config, h100 = paper_model("CALM-XL"), hardware.device("h100")
    deterministic = config.model_copy(update={"deterministic": True})
    usual, ordered = (step_time.step_time(run, 64, h100, 8) for run in (config, deterministic))
    assert 1.005 < ordered.compute / usual.compute < 1.6
    assert (ordered.passes, ordered.tensor, ordered.optimizer) == (
        usual.passes,
        usual.tensor,
        usual.optimizer,
    )
    for run, is_named in ((config, False), (deterministic, True)):
        for document in (plan_document(run, 1, h100), build([Subject(run)])):
            assert ("deterministic: true" in to_markdown(document)) is is_named


def test_plain_kernels_are_slower() -> None:
    config, h100 = paper_model("CALM-XL"), hardware.device("h100")
    fused, plain = (
        step_time.step_time(config, 64, h100, 8, software=software).total for software in (OURS, OURS_PLAIN)
    )
    assert 1.1 < plain / fused < 2


def test_the_autoencoder_is_bound_by_its_cross_entropy() -> None:
    config = load(ROOT / "configs" / "runs" / "calm-xl.yaml")
    seconds = step_time.autoencoder_step_seconds(config, 8, hardware.device("h100"), 8)
    assert config.autoencoder is not None
    logits = config.autoencoder.training.global_batch * config.autoencoder.patches * config.patch_size
    moved = 54 * logits * config.vocab_size / 8 / (0.83 * 3350e9)
    assert moved < seconds < 2 * moved
