"""Parameters and FLOPs against known totals and a count by hand; the layout never changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from calm_scale.accounting.compared_models import paper_model, table1
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.costs import (
    component_table,
    evaluation_per_token,
    run_totals,
    step_flops,
    token_costs,
    tokens_per_step,
)
from calm_scale.accounting.model_components import (
    autoencoder_components,
    lm_components,
    lm_parameters,
    parameters,
)
from calm_scale.config.run import RunConfig

MakeRun = Callable[..., RunConfig]


def test_parameters_of_the_published_models() -> None:
    config = paper_model("CALM-M").model_copy(update={"vocab_size": 128_257})
    assert lm_parameters(config) == 371_732_608
    assert parameters_of(autoencoder_components(config)) == 75_832_064


def test_hand_count_with_grouped_queries_and_gated_mlp(tiny: MakeRun) -> None:
    config = tiny(backbone={"num_query_groups": 2})
    d, ff, kv, p, v = 16, 40, 8, 8, 96
    n, m, l, noise, k = 3, 5, 12, 64, 4
    layer = d * (d + 2 * kv) + d * d + 3 * d * ff
    attention = 2 * p * d
    assert parameters(config)["backbone"] == 2 * (layer + 2 * d) + d
    assert parameters(config)["embedding"] == v * d
    compressor = k * d * 2 * d + 2 * d * d
    assert parameters(config)["input"] == compressor + 2 * d + d + 2 * d
    shared_head = d * d + d * d
    per_sample = 5 * d * d + d * d + d * l
    a, f = 8, 20
    encoder = k * 3 * a * f + k * a * a + 3 * a * f + a * 2 * l
    decoder = l * a + 3 * a * f + a * k * a + k * 3 * a * f + k * a * v
    forward = (
        2 * (layer + attention)
        + compressor
        + shared_head
        + n * (noise * d + per_sample)
        + n * m * l
        + n * (n - 1) // 2 * l
        + encoder
    )
    backward = (
        2 * (2 * (layer + attention) + compressor + shared_head + n * per_sample)
        + n * noise * d
        + n * m * l
        + 2 * (n * (n - 1) // 2) * l
    )
    inference = 2 * (layer + attention) + compressor + shared_head + noise * d + per_sample + decoder
    costs = token_costs(config)
    assert costs.training == 2 * (forward + backward) / k
    assert costs.inference == 2 * inference / k
    assert evaluation_per_token(config) == 2 * forward / k
    halved = 3 * 2 * (attention - (p + 1) * d)
    assert costs.training_causal == pytest.approx(costs.training - 2 * halved / k)


def test_grouped_queries_change_projections_but_not_the_score_product(tiny: MakeRun) -> None:
    def rows(groups: int) -> dict[str, float]:
        return {row.name: row.forward for row in component_table(tiny(backbone={"num_query_groups": groups}))}

    many, few = rows(4), rows(1)
    assert few["layer.attention.qkv"] < many["layer.attention.qkv"]
    assert few["layer.attention.scores"] == many["layer.attention.scores"]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"pipeline": 2},
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        {"data": 4, "distributed_optimizer": False},
        {"head_parallelism": "tensor", "tensor": 2},
    ],
)
def test_layout_changes_neither_parameters_nor_model_flops(tiny: MakeRun, parallel: dict[str, Any]) -> None:
    alone, laid_out = tiny(), tiny(parallel=parallel)
    assert parameters(laid_out) == parameters(alone)
    assert token_costs(laid_out) == token_costs(alone)
    assert step_flops(laid_out) == step_flops(alone)


def test_zero_stage_changes_nothing(tiny: MakeRun) -> None:
    model = {"hidden_size": 8, "ffn_size": 20, "latent_size": 12}
    totals = {
        run_totals(tiny(autoencoder={"model": model, "zero": {"stage": stage}})).autoencoder
        for stage in range(4)
    }
    assert len(totals) == 1


def test_recompute_is_hardware_not_model(tiny: MakeRun) -> None:
    none, selective, full = (
        token_costs(tiny(parallel={"recompute": r})) for r in ("none", "selective", "full")
    )
    assert none.training == selective.training == full.training
    assert none.hardware == none.training
    rows = component_table(tiny())
    blocks = [r for r in rows if ".block." in r.name and r.name != "head.block.down"]
    layer_forward = sum(r.forward for r in [*blocks, *(r for r in rows if r.part == "backbone")])
    scores = sum(row.forward for row in component_table(tiny()) if row.name.endswith(("scores", "values")))
    assert full.hardware - full.training == layer_forward
    assert selective.hardware - selective.training == scores


def test_shared_condition_saves_n_minus_one_projections(tiny: MakeRun) -> None:
    shared = token_costs(tiny())
    unshared = token_costs(tiny(), shared_condition=False)
    blocks, d, n, k = 1, 16, 3, 4
    assert unshared.training - shared.training == 2 * 3 * (n - 1) * (1 + blocks) * d * d / k
    assert unshared.inference == shared.inference


def test_draws_repeat_head_and_decoder_only(tiny: MakeRun) -> None:
    one, many = (token_costs(tiny(), num_draws=n).inference for n in (1, 10))
    per_draw = sum(2 * c.forward * c.per_draw for c in lm_components(tiny())) / 4
    assert many - one == 9 * per_draw
    assert 0 < per_draw < one


@pytest.mark.parametrize("mode", ["discrete", "continuous", "both"])
def test_input_modes(tiny: MakeRun, mode: str) -> None:
    counts = parameters(tiny(input_mode=mode))
    assert ("embedding" in counts) == (mode != "continuous")
    assert counts["input"] > 0


def test_run_totals_follow_steps_batch_and_length(tiny: MakeRun) -> None:
    config = tiny()
    totals = run_totals(config)
    assert tokens_per_step(config) == 4 * 8 * 4
    assert totals.lm_tokens == 10 * 4 * 8 * 4
    assert totals.autoencoder_tokens == 5 * 4 * 8 * 4
    assert totals.total == totals.lm + totals.autoencoder > totals.lm


def test_table_1_within_five_percent() -> None:
    rows = table1()
    assert [row.paper.model for row in rows] == [
        "Transformer-S",
        "Transformer-M",
        "Transformer-L",
        "CALM-M",
        "CALM-L",
        "CALM-XL",
    ]
    for row in rows:
        for deviation in (row.parameters_deviation, row.training_deviation, row.inference_deviation):
            assert abs(deviation) < 0.05, row
        assert (row.autoencoder_parameters > 0) == row.paper.model.startswith("CALM")


def test_table_1_numbers_of_the_convention() -> None:
    inference = {row.paper.model: row.inference / 1e8 for row in table1()}
    training = {row.paper.model: row.training_lm / 1e20 for row in table1()}
    assert inference["Transformer-S"] == pytest.approx(4.42, abs=0.01)
    assert training["Transformer-L"] == pytest.approx(22.5, abs=0.05)
    assert inference["CALM-M"] == pytest.approx(2.90, abs=0.01)
    assert inference["CALM-XL"] == pytest.approx(9.71, abs=0.01)
