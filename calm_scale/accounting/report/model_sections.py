"""The sections of a report that follow from the configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from calm_scale.accounting.costs import (
    CONVENTION,
    Row,
    autoencoder_table,
    component_table,
    run_totals,
    token_costs,
    tokens_per_step,
)
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Cell, Column, Section, Table
from calm_scale.accounting.table1 import NOTES, Table1Row, table1
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
        note="The frozen autoencoder stands in the table with its parameters; `trained` leaves it out.",
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
