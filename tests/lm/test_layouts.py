"""Every layout computes the same thing: losses, norms, every gradient, every moment, and what is resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lm_cases import LAYOUTS_FOUR, LAYOUTS_ONE, LAYOUTS_TWO
from lm_ranks import tiny_run

from calm_scale.accounting.placement import balance
from calm_scale.config import RunConfig

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

TWINS = [
    (case["name"], base)
    for cases, base in (
        (LAYOUTS_ONE[1:4], "one"),
        (LAYOUTS_TWO[:11], "one"),
        (LAYOUTS_FOUR[:2], "one"),
        (LAYOUTS_TWO[12:], "one_ar"),
    )
    for case in cases
]
TWINS += [("tp2_flow", "one_flow"), ("pp2_diffusion", "one_diffusion"), ("tp2_both", "one_both")]
TWINS += [(name, "one_atoms") for name in ("tp2_atoms", "tp2_head_atoms", "pp2_atoms")]
TWINS += [
    ("dp2_pad", "one_pad"),
    ("tp2_pad", "one_pad"),
]  # unequal counts per rank: a mean over the global batch


@pytest.mark.parametrize(("name", "base"), TWINS)
def test_losses_norms_and_evaluation_are_those_of_one_rank(reports: Any, name: str, base: str) -> None:
    ours, theirs = reports[name], reports[base]
    assert "error" not in ours
    assert ours["same_on_all_ranks"]
    for (loss, norm, skipped), (loss_one, norm_one, _) in zip(ours["steps"], theirs["steps"], strict=True):
        assert not skipped
        assert loss == pytest.approx(loss_one, rel=1e-5)
        assert norm == pytest.approx(norm_one, rel=1e-5)
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-5)


@pytest.mark.parametrize(("name", "base"), TWINS)
def test_every_gradient_is_that_of_one_rank(reports: Any, name: str, base: str) -> None:
    """After one step: rounding alone parts them. Later steps multiply it wherever Adam divides by a small moment."""
    ours, theirs = reports.tensors(f"first_{name}"), reports.tensors(f"first_{base}")
    assert ours.keys() == theirs.keys()
    moments = [key for key in ours if key.startswith("optimizer.exp_avg.")]
    assert any(".head." in key for key in moments)
    for key in moments:
        scale = theirs[key].abs().max().item()
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=5e-6 * scale, msg=key)


def test_the_layout_that_auto_trained_is_uneven() -> None:
    run = RunConfig.model_validate(tiny_run(pipeline=2, pipeline_layout="auto"))
    assert balance(run) == (3, 1)


def test_all_gradients_are_there(reports: Any) -> None:
    """A comparison of zeros would prove nothing."""
    moments = {k: v for k, v in reports.tensors("ckpt_one").items() if k.startswith("optimizer.exp_avg.")}
    assert len(moments) > 40
    assert [key for key, value in moments.items() if value.abs().max() == 0] == []


def test_the_checkpoint_holds_the_true_vocabulary(reports: Any) -> None:
    for name in ("ckpt_one", "ckpt_tp2"):
        table = reports.tensors(name)["model.compressor.tokens.embedding.table.weight"]
        assert tuple(table.shape) == (101, 32)
    assert tuple(reports.tensors("ckpt_tp2_ar")["model.head.linear.weight"].shape) == (101, 32)


def test_replicas_are_bit_equal_after_twenty_steps(reports: Any) -> None:
    assert "error" not in reports["twenty"]
    assert len(reports["twenty"]["steps"]) == 20


def test_bf16_keeps_fp32_masters_and_agrees_over_replicas(reports: Any) -> None:
    one, two = reports["one_bf16"], reports["dp2_bf16"]
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-3)
    masters = {k: v for k, v in reports.tensors("ckpt_dp2_bf16").items() if k.startswith("optimizer.master.")}
    assert masters
    assert all(v.dtype == torch.float32 for v in masters.values())


def test_overlapped_collectives_change_nothing(reports: Any) -> None:
    """To the bit with one bucket. ``dp2_buckets``, among the twins, has one for each weight: another order of sums."""
    assert reports["dp2_overlap"] == reports["dp2"]
    for name in ("first", "ckpt"):
        ours, theirs = reports.tensors(f"{name}_dp2_overlap"), reports.tensors(f"{name}_dp2")
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def test_padding_changes_the_mean(reports: Any) -> None:
    """Otherwise the padded twins would prove nothing."""
    assert reports["one_pad"]["steps"][0][0] != pytest.approx(reports["one"]["steps"][0][0], rel=1e-4)
