"""Plans for several numbers of nodes: the best layout of each, and how many nodes to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calm_scale.accounting import plan, saves
from calm_scale.accounting.backbone_model import lm_of
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.plan import Layout
from calm_scale.accounting.report.document import Cell, Column, Document, Section, Table
from calm_scale.accounting.report.plan_sections import (
    LAYOUT_NUMBERS,
    layout_name,
    layout_numbers,
    plan_document,
)
from calm_scale.config.errors import ConfigError
from calm_scale.config.run import RunConfig

WORTH = 1.25
"""More nodes are taken as long as the whole training costs at most this times the cheapest."""

_COLUMNS = (
    Column("nodes", "Nodes", "integer"),
    Column("choice", ""),
    Column("layout", "Best layout"),
    Column("micro_batch", "Micro batch", "integer"),
    Column("recompute", "Recompute", spare=2),
    Column("fits", "Fits"),
    Column("memory", "Fullest rank", "bytes"),
    Column("step", "Step", "seconds", spare=3),
    Column("bubble", "Bubble", "percent", spare=7),
    Column("tokens_per_second", "Tokens/s", "number", spare=6),
    Column("mfu", "MFU", "percent", spare=4),
    Column("days", "Days", "number"),
    Column("dollars", "Cost $", "integer"),
    Column("save_every", "Save every", "seconds", spare=5),
    *LAYOUT_NUMBERS,
)


def scaling_document(
    config: RunConfig,
    counts: Sequence[int],
    chip: Device,
    *,
    gpus_per_node: int = 8,
    dollars_per_device_hour: float | None = None,
) -> Document:
    """The best layout for each number of nodes, and the plan of the number chosen.

    Raises:
        ConfigError: no number of nodes has a layout.
    """
    best, refused = _best(config, counts, chip, gpus_per_node)
    chosen = choose(best)
    price = 1.0 if dollars_per_device_hour is None else dollars_per_device_hour / chip.dollars_per_hour
    rows = tuple(_row(nodes, layout, chip, price, nodes == chosen) for nodes, layout in best.items())
    title = f"Best layout of each number of nodes of {gpus_per_node} {chip.key}"
    table = Table("nodes", title, _COLUMNS, rows)
    whole = plan_document(
        config, chosen, chip, gpus_per_node=gpus_per_node, dollars_per_device_hour=dollars_per_device_hour
    )
    text = (_why(best, chosen), *(f"{nodes} nodes: {reason}" for nodes, reason in refused.items()))
    section = Section("nodes", "How many nodes", text, (table,))
    first, *rest = whole.sections
    first = replace(first, title=f"Choice: {chosen} node{'s' if chosen > 1 else ''}")
    counted = f"{min(counts)} to {max(counts)}"
    return Document(
        f"Plan: {config.name} on {counted} nodes of {gpus_per_node} {chip.key}", (section, first, *rest)
    )


def choose(best: dict[int, Layout]) -> int:
    """The most nodes whose training costs at most :data:`WORTH` times the cheapest; where none fits, the most."""
    fitting = {nodes: layout.dollars for nodes, layout in best.items() if layout.fits}
    if not fitting:
        return max(best)
    return max(nodes for nodes, dollars in fitting.items() if dollars <= WORTH * min(fitting.values()))


def _best(
    config: RunConfig, counts: Sequence[int], chip: Device, gpus_per_node: int
) -> tuple[dict[int, Layout], dict[int, str]]:
    best, refused = {}, {}
    for nodes in sorted(set(counts)):
        try:
            best[nodes] = plan.rank(config, nodes, chip, gpus_per_node=gpus_per_node)[0]
        except ConfigError as error:
            refused[nodes] = str(error)
    if not best:
        raise ConfigError(next(iter(refused.values())))
    return best, refused


def _why(best: dict[int, Layout], chosen: int) -> str:
    if not best[chosen].fits:
        return "NO LAYOUT FITS on any of these: take a gpu with more memory or a smaller model."
    return (
        f"Chosen: {chosen} of {', '.join(map(str, best))}. More nodes shorten the training and cost more: "
        f"these are the most that keep the cost within {100 * (WORTH - 1):.0f} % of the cheapest."
    )


def _row(nodes: int, layout: Layout, chip: Device, price: float, chosen: bool) -> tuple[Cell, ...]:
    lm = lm_of(layout.config)
    ranks = layout.data_parallel * lm.parallel.model_parallel
    interval = lm.training.checkpoint.interval
    if interval == "auto":
        interval = saves.save_interval(
            layout.config, "lm", ranks=ranks, nodes=nodes, chip=chip, step_seconds=layout.time.total
        ).steps
    return (
        nodes,
        "chosen" if chosen else "",
        layout_name(layout),
        lm.training.micro_batch,
        lm.parallel.recompute,
        "yes" if layout.fits else "no",
        layout.fullest.total,
        layout.time.total,
        layout.bound.bubble,
        layout.tokens_per_second,
        layout.mfu,
        layout.days,
        layout.dollars * price,
        interval * layout.time.total,
        *layout_numbers(layout),
    )
