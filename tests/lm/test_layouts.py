"""Every layout computes the same thing: losses, norms, every gradient, every moment, and what is resumed."""

from __future__ import annotations

from typing import Any

import pytest
from lm_ranks import Reports, run_ranks, tiny_run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

STEPS = {"do": "train", "first": 1, "last": 3}
AR = {"kind": "softmax"}
FLOW = {"kind": "flow", "num_repeats": 2}
DIFFUSION = {"kind": "diffusion", "num_repeats": 2}


def same_steps(name: str, **run: Any) -> dict[str, Any]:
    """Three steps, then the state: the first moments are a fixed combination of the three steps' gradients."""
    actions = [STEPS, {"do": "save", "name": f"ckpt_{name}"}, {"do": "evaluate"}]
    return {"name": name, "run": tiny_run(**run), "actions": actions}


ONE = [
    same_steps("one"),
    same_steps("one_wide", training={"micro_batch": 4}, distributed_optimizer=False),
    same_steps("one_recompute", training={"micro_batch": 2}, recompute="full"),
    same_steps("one_selective", recompute="selective"),
    same_steps("one_bf16", training={"precision": "bf16"}),
    same_steps("one_ar", head=AR),
    same_steps("one_flow", head=FLOW),
    same_steps("one_diffusion", head=DIFFUSION),
]
TWO = [
    same_steps("tp2", tensor=2, check_replicas=True),
    same_steps("tp2_sp", tensor=2, sequence_parallel=True, recompute="full"),
    same_steps("pp2", pipeline=2),
    same_steps("pp2_uneven", pipeline=2, pipeline_layout=[3, 1]),
    same_steps("pp2_virtual", pipeline=2, virtual_pipeline=2),
    same_steps("tp2_head", tensor=2, head_parallelism="tensor", check_replicas=True),
    same_steps("tp2_sp_head", tensor=2, head_parallelism="tensor", sequence_parallel=True),
    same_steps("dp2"),
    same_steps("dp2_plain", distributed_optimizer=False, training={"micro_batch": 2}),
    same_steps("dp2_bf16", training={"precision": "bf16"}),
    same_steps("tp2_ar", tensor=2, head=AR),
    same_steps("tp2_ar_sp", tensor=2, head=AR, sequence_parallel=True),
]
OTHER_HEADS = [
    same_steps("tp2_flow", head=FLOW, tensor=2),
    same_steps("pp2_diffusion", head=DIFFUSION, pipeline=2),
]
TWENTY = {
    "name": "twenty",
    "run": tiny_run(tensor=2, check_replicas=True),
    "actions": [{"do": "train", "first": 1, "last": 20}, {"do": "evaluate"}],
}
FOUR = [same_steps("tp2pp2", tensor=2, pipeline=2, check_replicas=True), TWENTY]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("layouts")
    run_ranks(1, ONE, out)
    run_ranks(2, TWO + OTHER_HEADS, out)
    run_ranks(4, FOUR, out)
    return Reports(out)


TWINS = [
    (case["name"], base)
    for cases, base in ((ONE[1:4], "one"), (TWO[:9], "one"), (FOUR[:1], "one"), (TWO[10:], "one_ar"))
    for case in cases
]
TWINS += [("tp2_flow", "one_flow"), ("pp2_diffusion", "one_diffusion")]


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
    import torch

    ours, theirs = reports.tensors(f"ckpt_{name}"), reports.tensors(f"ckpt_{base}")
    assert ours.keys() == theirs.keys()
    moments = [key for key in ours if key.startswith("optimizer.exp_avg.")]
    assert any(".head." in key for key in moments)
    for key in moments:
        scale = theirs[key].abs().max().item()
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-5 * scale, msg=key)


def test_all_gradients_are_there(reports: Any) -> None:
    """A comparison of zeros would prove nothing."""
    moments = {
        k: v for k, v in reports.tensors("ckpt_one").items() if k.startswith("optimizer.exp_avg.model")
    }
    assert all(v.abs().max() > 0 for v in moments.values())


def test_the_checkpoint_holds_the_true_vocabulary(reports: Any) -> None:
    for name in ("ckpt_one", "ckpt_tp2"):
        assert tuple(reports.tensors(name)["model.compressor.tokens.embedding.table.weight"].shape) == (
            101,
            32,
        )
    assert tuple(reports.tensors("ckpt_tp2_ar")["model.head.linear.weight"].shape) == (101, 32)


def test_replicas_are_bit_equal_after_twenty_steps(reports: Any) -> None:
    assert "error" not in reports["twenty"]
    assert len(reports["twenty"]["steps"]) == 20


def test_bf16_keeps_fp32_masters_and_agrees_over_replicas(reports: Any) -> None:
    one, two = reports["one_bf16"], reports["dp2_bf16"]
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-3)
    masters = {k: v for k, v in reports.tensors("ckpt_dp2_bf16").items() if k.startswith("optimizer.master.")}
    import torch

    assert masters
    assert all(v.dtype == torch.float32 for v in masters.values())
