"""Resume: bitwise in the same layout, exact state and close losses in another, and nothing loaded by halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def assert_bit_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not different


@pytest.mark.parametrize(("name", "base"), [("one_same", "one"), ("tp2pp2_same", "tp2pp2")])
def test_same_layout_goes_on_bitwise(reports: Any, name: str, base: str) -> None:
    assert reports[name]["steps"] == reports[f"straight_{base}"]["steps"][2:]
    assert_bit_equal(reports.tensors(f"end_{name}"), reports.tensors(f"end_{base}"))


MOVED = [
    ("tp2pp2_from_one", "one"),
    ("tp2_from_one", "one"),
    ("dp2_from_one", "one"),
    ("one_plain", "one"),
    ("pp2_from_tp2pp2", "tp2pp2"),
    ("dp2_plain_from_tp2pp2", "tp2pp2"),
    ("one_from_tp2pp2", "tp2pp2"),
]


@pytest.mark.parametrize(("name", "base"), MOVED)
def test_another_layout_holds_the_same_weights_and_moments(reports: Any, name: str, base: str) -> None:
    assert_bit_equal(reports.tensors(f"again_{name}"), reports.tensors(f"half_{base}"))
    assert reports[name]["steps_loaded"] == 2


@pytest.mark.parametrize(("name", "base"), MOVED)
def test_another_layout_goes_on_within_float_tolerance(reports: Any, name: str, base: str) -> None:
    for ours, theirs in zip(reports[name]["steps"], reports[f"straight_{base}"]["steps"][2:], strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)


def test_an_atoms_head_of_split_weights_goes_on_whole(reports: Any) -> None:
    assert_bit_equal(reports.tensors("again_atoms_from_tp2"), reports.tensors("first_tp2_head_atoms"))
    for ours, theirs in zip(
        reports["atoms_from_tp2"]["steps"], reports["one_atoms"]["steps"][1:], strict=True
    ):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)


def test_a_background_save_holds_the_state_before_the_steps_taken_meanwhile(reports: Any) -> None:
    assert reports["one_from_async"]["steps"] == [
        pytest.approx(step, rel=1e-5) for step in reports["async"]["steps"][2:]
    ]
    assert_bit_equal(reports.tensors("again_one_from_async"), reports.tensors("async_half"))


def test_a_renamed_key_is_an_error_that_names_both(reports: Any) -> None:
    error = reports["renamed"]["error"]
    assert "missing: model.decoder.final_layernorm.weight" in error
    assert "unexpected: model.decoder.final_norm.weight" in error
    assert "steps" not in reports["renamed"]


def test_another_model_is_refused(reports: Any) -> None:
    assert "mlp_blocks.1" in reports["other_head"]["error"]


def test_an_index_that_names_code_is_refused(reports: Any) -> None:
    assert "builtins.print" in reports["hostile"]["error"]


def test_a_folder_without_index_is_named(reports: Any) -> None:
    assert "half_nothing" in reports["not_there"]["error"]


@pytest.mark.parametrize("name", ["poisoned", "poisoned_dp"])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(reports: Any, name: str) -> None:
    assert [skipped for _, _, skipped in reports[name]["steps"]] == [False, True]
    assert reports[name]["same_on_all_ranks"]


def test_a_skipped_step_changes_nothing(reports: Any) -> None:
    assert_bit_equal(reports.tensors("after"), reports.tensors("before"))


def test_the_replica_check_names_a_weight_that_drifted(reports: Any) -> None:
    assert "ReplicaMismatchError" in reports["drifted"]["error"]
    assert "input_layernorm" in reports["drifted"]["error"]


def test_pipeline_evaluates_before_and_twice_after_training_with_one_micro_batch(reports: Any) -> None:
    before, first, second = reports["pp2_twice"]["eval"]
    assert first == second != before


def test_an_interleaved_schedule_that_cannot_start_is_refused(reports: Any) -> None:
    assert "micro-batches" in reports["virtual_refused"]["error"]
