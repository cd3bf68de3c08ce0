"""Resume: bitwise in the same layout, exact state and close losses in another, and nothing loaded by halves."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_ranks import Reports, run_ranks, tiny_run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def train(first: int, last: int) -> dict[str, Any]:
    return {"do": "train", "first": first, "last": last}


def save(name: str) -> dict[str, Any]:
    return {"do": "save", "name": name}


def case(name: str, *actions: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {"name": name, "run": tiny_run(**run), "actions": list(actions)}


def resumed(name: str, source: str, **run: Any) -> dict[str, Any]:
    return case(
        name, {"do": "load", "name": source}, save(f"again_{name}"), train(3, 7), save(f"end_{name}"), **run
    )


WRITE_ONE = [case("one", train(1, 2), save("half_one"), train(3, 7), save("end_one"))]
FOUR = [
    case("tp2pp2", train(1, 2), save("half_tp2pp2"), train(3, 7), save("end_tp2pp2"), tensor=2, pipeline=2),
    resumed("tp2pp2_same", "half_tp2pp2", tensor=2, pipeline=2),
    resumed("tp2pp2_from_one", "half_one", tensor=2, pipeline=2),
]
TWO = [
    resumed("tp2_from_one", "half_one", tensor=2),
    resumed("pp2_from_tp2pp2", "half_tp2pp2", pipeline=2, pipeline_layout=[1, 3]),
    resumed("dp2_from_one", "half_one"),
    resumed("dp2_plain_from_tp2pp2", "half_tp2pp2", distributed_optimizer=False),
    case(
        "poisoned",
        train(1, 1),
        save("before"),
        {"do": "poison", "rank": 1},
        train(2, 2),
        save("after"),
        tensor=2,
    ),
    case("async", train(1, 2), {"do": "save_async", "name": "async_half", "step": 3}, train(4, 7), tensor=2),
    case("poisoned_dp", train(1, 1), {"do": "poison", "rank": 1}, train(2, 2)),
    case("drifted", {"do": "drift", "rank": 1}, {"do": "evaluate"}, tensor=2, check_replicas=True),
    case(
        "pp2_twice",
        {"do": "evaluate"},
        train(1, 1),
        {"do": "evaluate"},
        {"do": "evaluate"},
        pipeline=2,
        training={"micro_batch": 4},
    ),
    case("virtual_refused", train(1, 1), pipeline=2, virtual_pipeline=2, training={"micro_batch": 4}),
]
READ_ONE = [
    resumed("one_same", "half_one"),
    resumed("one_from_tp2pp2", "half_tp2pp2"),
    resumed("one_from_async", "async_half"),
    resumed("one_plain", "half_one", distributed_optimizer=False),
    resumed("other_head", "half_one", head={"kind": "energy", "num_blocks": 2, "noise_size": 8}),
    resumed("renamed", "half_renamed"),
    resumed("hostile", "half_hostile"),
    resumed("not_there", "half_nothing"),
]  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("resume")
    run_ranks(1, WRITE_ONE, out)
    damage(out / "half_one", out)
    run_ranks(4, FOUR, out)
    run_ranks(2, TWO, out)
    run_ranks(1, READ_ONE, out)
    return Reports(out)


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("code ran while loading",))


def damage(good: Path, out: Path) -> None:
    """Copies of a checkpoint: one with a key renamed, one whose index would run code, one without an index."""
    for name in ("half_renamed", "half_hostile", "half_nothing"):
        shutil.copytree(good, out / name)
    index = pickle.loads((good / ".metadata").read_bytes())
    old, new = "model.decoder.final_layernorm.weight", "model.decoder.final_norm.weight"
    index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
    (out / "half_renamed" / ".metadata").write_bytes(pickle.dumps(index))
    index.planner_data = Hostile()
    hostile = io.BytesIO()
    pickle.dump(index, hostile)
    (out / "half_hostile" / ".metadata").write_bytes(hostile.getvalue())
    (out / "half_nothing" / ".metadata").unlink()


def assert_bit_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not different


@pytest.mark.parametrize(("name", "base"), [("one_same", "one"), ("tp2pp2_same", "tp2pp2")])
def test_same_layout_goes_on_bitwise(reports: Any, name: str, base: str) -> None:
    assert reports[name]["steps"] == reports[base]["steps"][2:]
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
    for ours, theirs in zip(reports[name]["steps"], reports[base]["steps"][2:], strict=True):
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
