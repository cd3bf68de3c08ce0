"""Pipeline balance: every layout is legal, the heaviest stage is minimal, and explicit wishes are honoured."""

from __future__ import annotations

import itertools

import pytest

from calm_scale.accounting.placement import balance, layer_costs, pipeline_bound, stage_shares
from calm_scale.config.run import RunConfig


def run_config(num_layers: int = 16, hidden: int = 64, **parallel: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "layout",
            "vocab_size": 256,
            "patch_size": 4,
            "lm": {
                "backbone": {
                    "num_layers": num_layers,
                    "hidden_size": hidden,
                    "ffn_size": 2 * hidden,
                    "positions": 16,
                },
                "training": {"steps": 10, "global_batch": 8},
                "parallel": parallel,
            },
        }
    )


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "virtual"), [(16, 2, 1), (12, 4, 1), (16, 2, 4), (9, 3, 2)]
)
def test_every_chunk_has_a_layer_and_all_layers_are_placed(
    num_layers: int, pipeline: int, virtual: int
) -> None:
    layers = balance(run_config(num_layers, pipeline=pipeline, virtual_pipeline=virtual))
    assert len(layers) == pipeline * virtual
    assert sum(layers) == num_layers
    assert min(layers) >= 1


@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_auto_minimises_the_heaviest_stage(pipeline: int) -> None:
    config = run_config(10, pipeline=pipeline)
    costs = layer_costs(config)

    def heaviest(layers: tuple[int, ...]) -> int:
        work = [n * costs.layer for n in layers]
        return max(work[0] + costs.first, *work[1:-1], work[-1] + costs.last)

    splits = (s for s in itertools.product(range(1, 11), repeat=pipeline) if sum(s) == 10)
    assert heaviest(balance(config)) == min(map(heaviest, splits))


def test_head_takes_layers_from_the_last_stage() -> None:
    layers = balance(run_config(16, hidden=512, pipeline=2))
    assert layers[-1] < layers[0]


def test_even_and_explicit_layouts_stand() -> None:
    assert balance(run_config(16, pipeline=4, pipeline_layout="even")) == (4, 4, 4, 4)
    assert balance(run_config(16, pipeline=2, pipeline_layout=[11, 5])) == (11, 5)


def test_shares_sum_to_one_and_bound_follows_the_schedule() -> None:
    config = run_config(16, pipeline=2, virtual_pipeline=2)
    assert sum(share.share for share in stage_shares(config)) == pytest.approx(1)
    bound = pipeline_bound(config, num_micro_batches=4)
    assert bound.bubble == pytest.approx(1 / (2 * 4 + 1))
    assert bound.efficiency == pytest.approx((1 - bound.bubble) / bound.imbalance)
    assert pipeline_bound(run_config(16), 1).efficiency == 1
