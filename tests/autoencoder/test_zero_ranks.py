"""The DeepSpeed engine on gloo ranks: equal losses in every layout, exact resume, resharding, skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(run_ranks: Callable[..., Results], folder: Path) -> Results:
    return run_ranks(2, "layouts+resume+nonfinite", folder)


@pytest.fixture(scope="module")
def one(run_ranks: Callable[..., Results], folder: Path, two: Results) -> dict[str, Any]:
    return run_ranks(1, "plain+layouts+across", folder)[0]


@pytest.fixture(scope="module")
def three(run_ranks: Callable[..., Results], folder: Path, two: Results) -> Results:
    return run_ranks(3, "across", folder)


def close(have: Any, want: Any, rel: float = 1e-5) -> None:
    for h, w in zip(have, want, strict=True):
        assert h == pytest.approx(w, rel=rel, abs=1e-7)


LAYOUTS = [f"zero{stage} acc{accumulation}" for stage in range(4) for accumulation in (1, 4)]


def test_every_rank_reports_the_same_numbers(two: Results) -> None:
    assert two[0] == two[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_equal_plain_pytorch(one: dict[str, Any], two: Results, layout: str) -> None:
    want = one["plain"]["steps"][:3]
    close(one["layouts"][layout][:3], want)
    close(two[0]["layouts"][layout][:3], want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluations_are_equal_in_every_layout(one: dict[str, Any], two: Results, layout: str) -> None:
    want = one["layouts"]["zero0 acc1"][3]
    close([one["layouts"][layout][3], two[0]["layouts"][layout][3]], [want, want], rel=1e-4)


def test_clipping_was_in_force(one: dict[str, Any]) -> None:
    assert all(norm > 0.5 for _, norm, _ in one["plain"]["steps"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_resume_is_bit_equal(two: Results, stage: int, precision: str) -> None:
    assert two[0]["resume"][f"{stage} {precision}"] == {
        "same_steps": True,
        "same_weights": True,
        "moved": True,
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_resume_with_offloaded_optimizer_is_bit_equal(two: Results, stage: int) -> None:
    assert two[0]["resume"][f"{stage} cpu"] == {"same_steps": True, "same_weights": True, "moved": True}


@pytest.mark.parametrize("stage", range(4))
def test_a_two_rank_checkpoint_goes_on_at_any_stage_on_one_and_three_ranks(
    one: dict[str, Any], three: Results, stage: int
) -> None:
    """Each stage loads what the next one saved; steps 4 and 5 equal the unbroken run with its Adam moments."""
    want = one["plain"]["steps"][3:]
    close(one["across"][f"zero{stage}"], want)
    close(three[0]["across"][f"zero{stage}"], want)
    final = one["layouts"]["zero0 weights"]
    for have in (one["across"], three[0]["across"]):
        for name, sums in final.items():
            assert have[f"zero{stage} weights"][name] == pytest.approx(sums, rel=1e-3, abs=1e-4)


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(one: dict[str, Any], three: Results) -> None:
    for results in (one, three[2]):
        nothing, truncated, missing, foreign = results["across"]["refusals"]
        assert "holds no saved training state" in nothing
        assert "state_00000_of_00002.safetensors cannot be read" in truncated
        assert "state_00000_of_00002.safetensors cannot be read" in missing
        assert "another model's state" in foreign and "encoder.norm.weight is [99]" in foreign


@pytest.mark.parametrize("stage", range(4))
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(two: Results, stage: int) -> None:
    for rank in two:
        assert rank["nonfinite"][f"zero{stage}"] == {
            "skipped": True,
            "grad_norm_finite": False,
            "unchanged": True,
            "goes_on": True,
            "finite": True,
        }


def test_nan_weights_on_one_rank_are_seen_by_all(two: Results) -> None:
    assert [rank["nonfinite"]["finite after a NaN on rank 0"] for rank in two] == [False, False]
