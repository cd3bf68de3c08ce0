"""The sections of a report that follow from the model alone: components, Table 1, patch sizes, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from calm_scale.accounting.compared_models import (
    NOTES,
    Table1Row,
    baseline_at,
    baseline_of,
    table1,
    with_patch_size,
)
from calm_scale.accounting.costs import (
    CONVENTION,
    Row,
    autoencoder_table,
    autoencoder_training_per_token,
    brier_per_token,
    component_table,
    evaluation_per_token,
    run_totals,
    token_costs,
    tokens_per_step,
)
from calm_scale.accounting.model_components import is_autoregressive, lm_parameters
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Cell, Column, Section, Table
from calm_scale.accounting.sampling_cost import draws_at, expected_draws_uniform, per_token
from calm_scale.config.run import RunConfig

AUTOENCODER_PARTS = ("encoder", "decoder")
SMALLEST_SHARE = 0.05
COMPONENT_COLUMNS = (
    Column("part", "Part", spare=3),
    Column("component", "Component"),
    Column("copies", "×", "integer", spare=1),
    Column("parameters", "Params", "number"),
    Column("forward", "Forward", "flops"),
    Column("backward", "Backward", "flops"),
    Column("share", "Share", "percent"),
    Column("recompute", "Recompute", "flops", spare=2),
    Column("inference", "Inference", "flops"),
)


def convention_section() -> Section:
    """The convention, in words."""
    return Section("convention", "Convention", (CONVENTION,))


def table1_section(configs: Sequence[RunConfig] | None = None) -> Section:
    """Table 1 beside the paper's."""
    columns = (
        Column("model", "Model"),
        Column("parameters", "Params", "number"),
        Column("paper_parameters", "paper", "number"),
        Column("parameters_deviation", "dev.", "deviation"),
        Column("parameters_with_autoencoder", "with AE", "number"),
        Column("training", "Training FLOPs", "flops"),
        Column("paper_training", "paper", "flops"),
        Column("training_deviation", "dev.", "deviation"),
        Column("training_without_autoencoder", "without AE", "flops"),
        Column("training_unshared", "unshared head", "flops"),
        Column("inference", "Inference per token", "flops"),
        Column("paper_inference", "paper", "flops"),
        Column("inference_deviation", "dev.", "deviation"),
    )
    rows = tuple(_table1_cells(row) for row in table1(configs))
    return Section(
        "table1", "Table 1, ours beside the paper's", NOTES, (Table("table1", "Table 1", columns, rows),)
    )


def components_section(config: RunConfig) -> Section:
    """Component table, per token, and the run's totals."""
    table = Table(
        "components",
        f"{config.name}: where the FLOPs go (training forward and backward, recomputation, inference), per token",
        COMPONENT_COLUMNS,
        _component_rows(component_table(config)),
        note="The table lists the parameters of the frozen autoencoder; `trained` leaves it out.",
        num_total=2,
    )
    tables = [table, _totals_table(config)]
    if config.autoencoder is not None:
        tables.insert(1, _autoencoder_table(config))
    picture = pictures.shares(config.name, _shares(component_table(config)))
    return Section(f"components.{config.name}", f"{config.name}: components", (), tuple(tables), (picture,))


def autoencoder_section(config: RunConfig) -> Section:
    """Component table of a run that trains an autoencoder only."""
    table = _autoencoder_table(config)
    return Section(f"components.{config.name}", f"{config.name}: components", (), (table,))


def _autoencoder_table(config: RunConfig) -> Table:
    rows = _component_rows(autoencoder_table(config))
    title = f"{config.name}: the autoencoder's own training, per token"
    return Table("autoencoder", title, COMPONENT_COLUMNS, rows, num_total=1)


def _shares(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Per cent of training and inference FLOPs by part, the smallest left out."""
    training, inference = sum(row.training for row in rows), sum(row.inference for row in rows)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.part, []).append(row)
    shares = [
        (
            part,
            100 * sum(r.training for r in found) / training,
            100 * sum(r.inference for r in found) / inference,
        )
        for part, found in parts.items()
    ]
    return [share for share in shares if max(share[1:]) >= SMALLEST_SHARE]


def _component_rows(rows: Sequence[Row]) -> tuple[tuple[Cell, ...], ...]:
    whole = sum(row.training for row in rows)
    found: list[tuple[Cell, ...]] = []
    for _, group in groupby(rows, key=lambda row: row.part):
        members = list(group)
        found += [_component_cells(row, whole) for row in members]
    totals = [_total("total", rows)]
    if any(row.part not in AUTOENCODER_PARTS for row in rows):
        totals.insert(0, _total("trained", [row for row in rows if row.part not in AUTOENCODER_PARTS]))
    return (*found, *(("", *_component_cells(row, whole)[1:]) for row in totals))


def _total(name: str, rows: Sequence[Row]) -> Row:
    return Row(
        part="backbone",
        name=name,
        copies=1,
        parameters=sum(row.parameters for row in rows),
        forward=sum(row.forward for row in rows),
        backward=sum(row.backward for row in rows),
        recompute=sum(row.recompute for row in rows),
        inference=sum(row.inference for row in rows),
    )


def _component_cells(row: Row, whole: float) -> tuple[Cell, ...]:
    share = row.training / whole if whole else 0.0
    return (
        row.part,
        row.name,
        row.copies,
        row.parameters,
        row.forward,
        row.backward,
        share,
        row.recompute,
        row.inference,
    )


def _totals_table(config: RunConfig) -> Table:
    costs, totals = token_costs(config), run_totals(config)
    rows: list[tuple[Cell, ...]] = [
        (
            "model FLOPs, full attention (the convention)",
            costs.training,
            costs.training * tokens_per_step(config),
            totals.lm,
        ),
        (
            "model FLOPs, causal attention",
            costs.training_causal,
            costs.training_causal * tokens_per_step(config),
            costs.training_causal * totals.lm_tokens,
        ),
        (
            "hardware FLOPs (with recomputation)",
            costs.hardware,
            costs.hardware * tokens_per_step(config),
            totals.lm_hardware,
        ),
        ("autoencoder training", totals.autoencoder / totals.lm_tokens, None, totals.autoencoder),
        ("language model + autoencoder", totals.total / totals.lm_tokens, None, totals.total),
        ("inference, full attention", costs.inference, None, None),
        ("inference, causal attention", costs.inference_causal, None, None),
    ]
    columns = (
        Column("what", "What"),
        Column("per_token", "per token", "flops"),
        Column("per_step", "per step", "flops"),
        Column("per_run", "per run", "flops"),
    )
    title = f"{config.name}: totals at {totals.lm_tokens:.4g} tokens"
    return Table("totals", title, columns, tuple(rows))


def _table1_cells(row: Table1Row) -> tuple[Cell, ...]:
    has_autoencoder = row.autoencoder_parameters > 0
    return (
        row.paper.model,
        row.parameters,
        row.paper.parameters,
        row.parameters_deviation,
        row.parameters + row.autoencoder_parameters if has_autoencoder else None,
        row.training,
        row.paper.training,
        row.training_deviation,
        row.training_lm if has_autoencoder else None,
        row.training_unshared if has_autoencoder else None,
        row.inference,
        row.paper.inference,
        row.inference_deviation,
    )


PATCH_SIZES = (1, 2, 4, 8)
TEMPERATURES = {"1": 1.0, "0.75": 0.75, "0.5": 0.5, "1/3": 1 / 3}
SUPPORTS = (1, 2, 10, 100)
CANDIDATES = (1, 10, 50, 100, 200, 500)


def patch_size_section(config: RunConfig) -> Section:
    """K = 1, 2, 4, 8 on the same backbone beside the AR baseline, per token and per patch."""
    columns = (
        Column("model", "Model"),
        Column("patch_size", "K", "integer"),
        Column("latent_size", "l", "integer"),
        Column("parameters", "Params", "number"),
        Column("training", "Train/token", "flops"),
        Column("training_per_patch", "Train/patch", "flops"),
        Column("training_causal", "Train/token, causal", "flops"),
        Column("autoencoder", "AE train/token", "flops"),
        Column("inference", "Infer/token", "flops"),
        Column("inference_per_patch", "Infer/patch", "flops"),
        Column("training_ratio", "Train vs AR", "percent"),
        Column("inference_ratio", "Infer vs AR", "percent"),
    )
    baseline = baseline_of(config)
    reference = token_costs(baseline)
    variants = [(k, with_patch_size(config, k)) for k in PATCH_SIZES]
    rows = [_size_cells("AR baseline, same backbone", baseline, baseline)]
    rows += [_size_cells(f"CALM K = {k}", variant, baseline) for k, variant in variants]
    table = Table("patch_sizes", f"{config.name}: patch sizes side by side", columns, tuple(rows))
    costs = [(k, token_costs(variant)) for k, variant in variants]
    picture = pictures.patch_sizes(
        [(k, c.training, c.inference) for k, c in costs], reference.training, reference.inference
    )
    text = (
        "The number of positions is kept, so a sequence of K-token patches covers K times the text. "
        "The autoencoder's training is listed separately, per token of its own training data."
    )
    return Section(
        f"patch_sizes.{config.name}", f"{config.name}: per token and per patch", (text,), (table,), (picture,)
    )


def crossover_section(config: RunConfig) -> Section:
    """Where CALM and the AR baseline cost the same."""
    if is_autoregressive(config):
        return Section(
            f"crossover.{config.name}", f"{config.name}: crossover", ("This run is the AR baseline itself.",)
        )
    costs, totals = token_costs(config), run_totals(config)
    baseline = baseline_of(config)
    reference = token_costs(baseline)
    saved = reference.training - costs.training
    equal = baseline_at(config, costs.training)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("training FLOPs per token, this run", _flops(costs.training)),
        ("training FLOPs per token, AR baseline on the same backbone", _flops(reference.training)),
        (
            "tokens after which the autoencoder's training is repaid",
            f"{totals.autoencoder / saved:.3g}" if saved > 0 else "never: the baseline is cheaper",
        ),
        (
            "tokens the baseline sees for this run's FLOPs, autoencoder included",
            f"{totals.total / reference.training:.4g}",
        ),
        (
            "AR baseline of equal training FLOPs per token (same depth)",
            f"width {equal.require_lm().backbone.hidden_size}, {lm_parameters(equal) / 1e6:.0f}M parameters, "
            f"{_flops(token_costs(equal).training)} a token",
        ),
        (
            "candidates per patch at which inference costs as much as the same-backbone baseline",
            f"{draws_at(config, reference.inference):.1f}",
        ),
    )
    columns = (Column("what", "What"), Column("value", "Value"))
    table = Table("crossover", f"{config.name}: crossover with the AR baseline", columns, rows)
    return Section(f"crossover.{config.name}", f"{config.name}: crossover at equal FLOPs", (), (table,))


def sampling_section(config: RunConfig) -> Section:
    """Decoding with candidates, exact temperature sampling and evaluation, per token."""
    title = f"{config.name}: sampling and evaluation"
    if is_autoregressive(config):
        return Section(f"sampling.{config.name}", title, ("A softmax samples any temperature at one draw.",))
    batch = tuple((n, per_token(config, n), per_token(config, n) / per_token(config, 1)) for n in CANDIDATES)
    exact = tuple(
        (label, support, draws, per_token(config, draws))
        for label, t in TEMPERATURES.items()
        for support in SUPPORTS
        for draws in (expected_draws_uniform(support, t),)
    )
    evaluation: tuple[tuple[Cell, ...], ...] = (
        ("in-loop evaluation (training loss, forward)", evaluation_per_token(config)),
        (f"BrierLM, {config.evaluation.num_samples} samples at every patch start", brier_per_token(config)),
        ("autoencoder training", autoencoder_training_per_token(config)),
    )
    tables = (
        Table(
            "candidates",
            "Batch sampling (Algorithm 2): N candidates a patch",
            (
                Column("candidates", "N", "integer"),
                Column("per_token", "FLOPs/token", "flops"),
                Column("ratio", "× one draw", "number"),
            ),
            batch,
        ),
        Table(
            "exact",
            "Exact sampling (Algorithm 1): expected draws",
            (
                Column("temperature", "T"),
                Column("support", "equally likely patches", "integer"),
                Column("draws", "expected draws", "number"),
                Column("per_token", "FLOPs/token", "flops"),
            ),
            exact,
            note="(n + 1[α>0] Σ P^(1/T−1)) / Σ P^(1/T), 1/T = n + α: depends on the law; shown for uniform laws.",
        ),
        Table(
            "evaluation",
            "Other passes",
            (Column("what", "What"), Column("per_token", "FLOPs/token", "flops")),
            evaluation,
        ),
    )
    return Section(f"sampling.{config.name}", title, (), tables)


def _size_cells(name: str, config: RunConfig, baseline: RunConfig) -> tuple[Cell, ...]:
    costs, reference, k = token_costs(config), token_costs(baseline), config.patch_size
    autoregressive = is_autoregressive(config)
    return (
        name,
        k,
        None if autoregressive else config.latent_size,
        lm_parameters(config),
        costs.training,
        costs.training * k,
        costs.training_causal,
        None if autoregressive else autoencoder_training_per_token(config),
        costs.inference,
        costs.inference * k,
        costs.training / reference.training,
        costs.inference / reference.inference,
    )


def _flops(value: float) -> str:
    return f"{value:.3e}"
