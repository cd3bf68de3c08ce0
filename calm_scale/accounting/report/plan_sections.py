"""The plan as a report: ranked layouts, the chosen one in full, how many nodes to take, what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calm_scale.accounting import hardware, layout_search, memory, saves, step_time
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.kernels import DETERMINISTIC_COST
from calm_scale.accounting.layout_search import Layout
from calm_scale.accounting.placement import stage_shares
from calm_scale.accounting.report.document import Cell, Column, Document, Section, Table
from calm_scale.accounting.report.layout_sections import MEMORY_PARTS
from calm_scale.config.errors import ConfigError
from calm_scale.config.quantities import bytes_text, seconds_text
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import Stage

SHOWN = 15
LAYOUT_NUMBERS = tuple(
    Column(key, heading, "integer", for_programs=True)
    for key, heading in (
        ("tensor", "Tensor"),
        ("pipeline", "Pipeline"),
        ("virtual_pipeline", "Chunks a rank"),
        ("data", "Data"),
        ("ranks", "Ranks"),
        ("sequence_parallel", "Sequence parallel"),
        ("micro_batches", "Micro-batches a step"),
        ("memory_limit", "Usable memory"),
        ("fits_memory", "Fits"),
    )
)
"""A layout in numbers and truth values, for programs."""


def plan_document(
    config: RunConfig,
    nodes: int,
    chip: hardware.Device,
    *,
    gpus_per_node: int = 8,
    dollars_per_device_hour: float | None = None,
) -> Document:
    """Layouts of ``config`` on ``nodes`` nodes of that device.

    Raises:
        ConfigError: no layout exists.
    """
    ranked = layout_search.rank(config, nodes, chip, gpus_per_node=gpus_per_node)
    price = chip.dollars_per_hour if dollars_per_device_hour is None else dollars_per_device_hour
    best = ranked[0]
    return Document(
        f"Plan: {config.name} on {nodes} × {gpus_per_node} {chip.key}",
        (
            _choice(best, nodes, chip, price / chip.dollars_per_hour),
            _ranking(ranked, price / chip.dollars_per_hour),
            _assumptions(best, gpus_per_node, chip, price),
        ),
    )


def _choice(best: Layout, nodes: int, chip: hardware.Device, price: float) -> Section:
    text = _advice(best, nodes, chip, price) if best.fits else _nothing_fits(best)
    return Section("choice", "Choice", text, (_memory_table(best),))


def _nothing_fits(best: Layout) -> tuple[str, ...]:
    return (
        f"NO LAYOUT FITS: the one nearest needs {bytes_text(best.fullest.total)} on a rank of stage "
        f"{best.fullest.stage}, {bytes_text(best.limit)} are usable. Take more nodes or a gpu with more memory.",
    )


def _advice(best: Layout, nodes: int, chip: hardware.Device, price: float) -> tuple[str, ...]:
    time = best.time
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in time.parts.items())
    return (
        f"{layout_name(best)}: {seconds_text(time.total)} a step, {best.tokens_per_second:,.0f} tokens/s, "
        f"MFU {100 * best.mfu:.0f} %, {best.days:.2f} days, ${best.dollars * price:,.0f}.",
        f"A step: {parts}. Heaviest stage {best.bound.imbalance:.2f} × the mean.",
        f"Fullest: stage {best.fullest.stage}, {bytes_text(best.fullest.total)} of {bytes_text(best.limit)} usable.",
        *_save_advice(best, nodes, chip),
        "Select it with: " + " ".join(f"--set {item}" for item in best.overrides),
    )


def _save_advice(best: Layout, nodes: int, chip: hardware.Device) -> tuple[str, ...]:
    """What `checkpoint.interval` is under this layout, why, and what it leaves of the time."""
    lm = best.config.require_lm()
    ranks = best.data_parallel * lm.parallel.model_parallel
    best_one = saves.save_interval(
        best.config, Stage.LM, ranks=ranks, nodes=nodes, chip=chip, step_seconds=best.time.total
    )
    text = saves.interval_text(best.config, Stage.LM, ranks=ranks, nodes=nodes, chip=chip)
    first = f"Checkpoint {bytes_text(best_one.checkpoint_bytes)}, saved {text}."
    auto = f"expected goodput {100 * best_one.goodput:.2f} %"
    if lm.training.checkpoint.interval == "auto":
        return (f"{first} {auto[0].upper()}{auto[1:]}.",)
    return (f"{first} `auto` would be {best_one.steps:,} ({best_one.reason}): {auto}.",)


def _ranking(ranked: list[Layout], price: float) -> Section:
    columns = (
        Column("layout", "Layout"),
        Column("layers", "Layers by chunk", spare=8),
        Column("micro_batch", "Micro batch", "integer"),
        Column("recompute", "Recompute"),
        Column("fits", "Fits"),
        Column("memory", "Fullest rank", "bytes"),
        Column("stage", "Stage", spare=7),
        Column("step", "Step", "seconds", spare=2),
        Column("bubble", "Bubble", "percent", spare=5),
        Column("imbalance", "Imbalance", "number", spare=6),
        Column("tokens_per_second", "Tokens/s", "number", spare=4),
        Column("mfu", "MFU", "percent", spare=3),
        Column("days", "Days", "number"),
        Column("dollars", "Cost $", "integer"),
        *LAYOUT_NUMBERS,
    )
    rows = tuple((*_cells(layout, price), *layout_numbers(layout)) for layout in ranked)
    table = Table("layouts", "Layouts, best first", columns, rows, num_shown=SHOWN)
    return Section("layouts", "Layouts", (), (table,))


def _cells(layout: Layout, price: float) -> tuple[Cell, ...]:
    lm = layout.config.require_lm()
    return (
        layout_name(layout),
        "+".join(map(str, layout.layers)),
        lm.training.micro_batch,
        lm.parallel.recompute,
        "yes" if layout.fits else "no",
        layout.fullest.total,
        str(layout.fullest.stage),
        layout.time.total,
        layout.bound.bubble,
        layout.bound.imbalance,
        layout.tokens_per_second,
        layout.mfu,
        layout.days,
        layout.dollars * price,
    )


def _memory_table(layout: Layout) -> Table:
    columns = (
        Column("stage", "Stage"),
        Column("layers", "Layers"),
        Column("share", "Share of the work", "percent"),
        *(Column(part, part.capitalize(), "bytes") for part in MEMORY_PARTS),
        Column("total", "Total", "bytes"),
    )
    stages = memory.language_model(layout.config, layout.data_parallel)
    rows = tuple(
        (
            str(m.stage),
            "+".join(map(str, work.layers)),
            work.share,
            *(getattr(m, part) for part in MEMORY_PARTS),
            m.total,
        )
        for m, work in zip(stages, stage_shares(layout.config), strict=True)
    )
    return Table(
        "memory", "Each pipeline stage: its share of a step's arithmetic, memory per rank", columns, rows
    )


def _assumptions(best: Layout, gpus_per_node: int, chip: hardware.Device, price: float) -> Section:
    config = best.config
    slower = step_time.slower_without_transformer_engine(config, best.data_parallel, chip, gpus_per_node)
    mtbf_hours = config.require_lm().training.checkpoint.node_mtbf_hours
    text = (
        step_time.assumptions(chip),
        f"Without Transformer Engine a step of the first layout takes {slower:.2f} times as long.",
        *([DETERMINISTIC_COST] if config.deterministic else []),
        f"Peak {chip.peak / 1e12:g} TFLOP/s ({chip.source}). "
        f"{100 * layout_search.USABLE_MEMORY:.0f} % of {chip.memory / 1e9:g} GB usable. "
        f"${price:g} a device-hour, an assumption of this table. "
        "MFU counts attention full, as the FLOPs report does, while kernels skip half of it.",
        f"Saves: {saves.STORAGE_PER_NODE / 1e9:g} GB/s a node, at most {saves.STORAGE_TOTAL / 1e9:g} GB/s in total, "
        f"and {saves.SAVE_OVERHEAD_SECONDS:g} s more for each save; {saves.RESTART_SECONDS:.0f} s to restart; "
        f"one failure of a node in {mtbf_hours:g} hours (lm.training.checkpoint.node_mtbf_hours).",
    )
    return Section("assumptions", "What this rests on", text)


def layout_numbers(layout: Layout) -> tuple[Cell, ...]:
    """The cells of ``LAYOUT_NUMBERS``."""
    lm = layout.config.require_lm()
    return (
        lm.parallel.tensor,
        lm.parallel.pipeline,
        lm.parallel.virtual_pipeline,
        layout.data_parallel,
        layout.data_parallel * lm.parallel.model_parallel,
        lm.parallel.sequence_parallel,
        lm.training.accumulation(layout.data_parallel),
        layout.limit,
        layout.fits,
    )


def layout_name(layout: Layout) -> str:
    """`tp2 pp4 × 2 chunks dp8`."""
    parallel = layout.config.require_lm().parallel
    chunks = f" × {parallel.virtual_pipeline} chunks" if parallel.virtual_pipeline > 1 else ""
    return f"tp{parallel.tensor} pp{parallel.pipeline}{chunks} dp{layout.data_parallel}"


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
            best[nodes] = layout_search.rank(config, nodes, chip, gpus_per_node=gpus_per_node)[0]
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
    lm = layout.config.require_lm()
    ranks = layout.data_parallel * lm.parallel.model_parallel
    interval = lm.training.checkpoint.interval
    if interval == "auto":
        interval = saves.save_interval(
            layout.config, Stage.LM, ranks=ranks, nodes=nodes, chip=chip, step_seconds=layout.time.total
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
