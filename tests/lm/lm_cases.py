"""The cases of ``test_layouts`` and ``test_resume``. They run once for both: starting ranks is what takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_ranks import run_ranks, tiny_run

AR = {"kind": "softmax"}
FLOW = {"kind": "flow", "num_repeats": 2}
ATOMS = {"kind": "atoms", "num_atoms": 6, "num_posterior": 5}
DIFFUSION = {"kind": "diffusion", "num_repeats": 2}


def same_steps(name: str, *, pad_id: int | None = None, **run: Any) -> dict[str, Any]:
    """The state after one step, whose first moments are its gradient times 1 − β₁, and after three."""
    actions = [
        {"do": "train", "first": 1, "last": 1},
        {"do": "save", "name": f"first_{name}"},
        {"do": "train", "first": 2, "last": 3},
        {"do": "save", "name": f"ckpt_{name}"},
        {"do": "evaluate"},
    ]
    return {"name": name, "run": tiny_run(**run), "actions": actions, "pad_id": pad_id}


LAYOUTS_ONE = [
    same_steps("one"),
    same_steps("one_wide", training={"micro_batch": 4}, distributed_optimizer=False),
    same_steps("one_recompute", training={"micro_batch": 2}, recompute="full"),
    same_steps("one_selective", recompute="selective"),
    same_steps("one_bf16", training={"precision": "bf16"}),
    same_steps("one_ar", head=AR),
    same_steps("one_flow", head=FLOW),
    same_steps("one_atoms", head=ATOMS),
    same_steps("one_diffusion", head=DIFFUSION),
    same_steps("one_pad", pad_id=100),
    same_steps("one_both", input_mode="both"),
]
LAYOUTS_TWO = [
    same_steps("tp2", tensor=2, check_replicas=True),
    same_steps("tp2_sp", tensor=2, sequence_parallel=True, recompute="full"),
    same_steps("pp2", pipeline=2),
    same_steps("pp2_auto", pipeline=2, pipeline_layout="auto"),
    same_steps("pp2_virtual", pipeline=2, virtual_pipeline=2),
    same_steps("tp2_head", tensor=2, head_parallelism="tensor", check_replicas=True),
    same_steps("tp2_sp_head", tensor=2, head_parallelism="tensor", sequence_parallel=True),
    same_steps("dp2"),
    same_steps("dp2_overlap", overlap=True),
    same_steps("dp2_buckets", overlap=True) | {"bucket": 100},
    same_steps("dp2_plain", distributed_optimizer=False, training={"micro_batch": 2}),
    same_steps("dp2_bf16", training={"precision": "bf16"}),
    same_steps("tp2_ar", tensor=2, head=AR),
    same_steps("tp2_ar_sp", tensor=2, head=AR, sequence_parallel=True),
]
OTHER_HEADS = [
    same_steps("tp2_flow", head=FLOW, tensor=2),
    same_steps("tp2_atoms", head=ATOMS, tensor=2, sequence_parallel=True),
    same_steps("tp2_head_atoms", head=ATOMS, tensor=2, head_parallelism="tensor", check_replicas=True),
    same_steps("pp2_atoms", head=ATOMS, pipeline=2),
    same_steps("pp2_diffusion", head=DIFFUSION, pipeline=2),
    same_steps("dp2_pad", pad_id=100),
    same_steps("tp2_pad", pad_id=100, tensor=2),
    same_steps("tp2_both", input_mode="both", tensor=2, sequence_parallel=True),
]
TWENTY = {
    "name": "twenty",
    "run": tiny_run(tensor=2, check_replicas=True),
    "actions": [{"do": "train", "first": 1, "last": 20}, {"do": "evaluate"}],
}
LAYOUTS_FOUR = [
    same_steps("tp2pp2", tensor=2, pipeline=2, check_replicas=True),
    same_steps("dp2pp2", pipeline=2, pipeline_layout="auto", check_replicas=True),
    TWENTY,
]


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


RESUME_ONE = [
    case(
        "straight_one",
        train(1, 2),
        save("half_one"),
        {"do": "damage", "name": "half_one"},
        train(3, 7),
        save("end_one"),
    )
]
RESUME_FOUR = [
    case(
        "straight_tp2pp2",
        train(1, 2),
        save("half_tp2pp2"),
        train(3, 7),
        save("end_tp2pp2"),
        tensor=2,
        pipeline=2,
    ),
    resumed("tp2pp2_same", "half_tp2pp2", tensor=2, pipeline=2),
    resumed("tp2pp2_from_one", "half_one", tensor=2, pipeline=2),
]
RESUME_TWO = [
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
RESUME_ONE_AFTER = [
    resumed("one_same", "half_one"),
    resumed("one_from_tp2pp2", "half_tp2pp2"),
    resumed("one_from_async", "async_half"),
    resumed("one_plain", "half_one", distributed_optimizer=False),
    resumed("other_head", "half_one", head={"kind": "energy", "num_blocks": 2, "noise_size": 8}),
    case(
        "atoms_from_tp2",
        {"do": "load", "name": "first_tp2_head_atoms"},
        save("again_atoms_from_tp2"),
        train(2, 3),
        head=ATOMS,
    ),
    resumed("renamed", "half_renamed"),
    resumed("hostile", "half_hostile"),
    resumed("not_there", "half_nothing"),
]  # fmt: skip


def run_all(out: Path) -> None:
    """Run every case on worlds of 1, 4 and 2 ranks, then those of one rank that read what the others wrote."""
    worlds = [
        (1, LAYOUTS_ONE + RESUME_ONE),
        (4, LAYOUTS_FOUR + RESUME_FOUR),
        (2, LAYOUTS_TWO + OTHER_HEADS + RESUME_TWO),
        (1, RESUME_ONE_AFTER),
    ]
    run_ranks(worlds, out)
