"""What the run's own layout means: stages, bubble, memory per rank, bytes per step."""

from __future__ import annotations

from calm_scale.accounting import communication, memory
from calm_scale.accounting.components import FLOPS_PER_MAC
from calm_scale.accounting.memory import Memory
from calm_scale.accounting.model_components import (
    input_components,
    input_encoder,
    is_autoregressive,
    loss_components,
    target_encoder,
)
from calm_scale.accounting.placement import layer_costs, pipeline_bound, stage_shares
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Cell, Column, Section, Table
from calm_scale.config.quantities import counted
from calm_scale.config.run import RunConfig

MEMORY_PARTS = ("weights", "gradients", "optimizer", "frozen", "activations", "output", "buffers")


def stages_section(config: RunConfig) -> Section:
    """Component × pipeline stage, the bubble and what imbalance leaves."""
    parallel, data = config.require_lm().parallel, _data_parallel(config)
    passes = config.require_lm().training.accumulation(data)
    bound = pipeline_bound(config, passes)
    text = (
        f"Layout: tensor {parallel.tensor} × pipeline {parallel.pipeline} × data {data}"
        + (f", {parallel.virtual_pipeline} chunks a rank" if parallel.virtual_pipeline > 1 else "")
        + f"; {passes} micro-batches of {config.require_lm().training.micro_batch} a step. "
        f"Heaviest stage {bound.imbalance:.3f} × the mean; bubble {100 * bound.bubble:.1f} % of a step; "
        f"at most {100 * bound.efficiency:.1f} % of the time can be useful."
    )
    shares = stage_shares(config)
    parts = [_stage_parts(config, index, len(shares), share.layers) for index, share in enumerate(shares)]
    rows = tuple(
        (str(share.stage), "+".join(map(str, share.layers)), *split, sum(split), share.share)
        for share, split in zip(shares, parts, strict=True)
    )
    columns = (
        Column("stage", "Stage"),
        Column("layers", "Layers"),
        Column("input", "Input side", "flops"),
        Column("backbone", "Layers' FLOPs", "flops"),
        Column("head", "Head or output", "flops"),
        Column("loss", "Loss", "flops"),
        Column("encoder", "Frozen encoder", "flops"),
        Column("total", "Total", "flops"),
        Column("share", "Share", "percent"),
    )
    table = Table("stages", f"{config.name}: training FLOPs per token, by pipeline stage", columns, rows)
    drawn = (
        (
            pictures.stages(
                config.name, [(f"stage {i}", (p[0], p[1], sum(p[2:]))) for i, p in enumerate(parts)]
            ),
        )
        if len(shares) > 1
        else ()
    )
    note = "Hardware FLOPs: recomputation included. The embedding look-up itself costs no matrix product."
    return Section(f"stages.{config.name}", f"{config.name}: pipeline stages", (text, note), (table,), drawn)


def memory_section(config: RunConfig) -> Section:
    """Bytes per rank of every stage, and of the autoencoder under each ZeRO stage."""
    data = _data_parallel(config)
    stages = memory.language_model(config, data)
    worst = memory.fullest(stages)
    columns = (
        Column("stage", "Stage"),
        *(Column(part, part.capitalize(), "bytes") for part in MEMORY_PARTS),
        Column("total", "Total", "bytes"),
    )
    tables = [
        Table(
            "memory",
            f"{config.name}: memory per rank of the language model",
            columns,
            tuple(_memory_cells(str(m.stage), m) for m in stages),
            note=f"Fullest: stage {worst.stage}. Output: final norm, head with its samples and loss, or logits. "
            "Framework, kernels' workspaces and fragmentation come on top.",
        )
    ]
    stage = config.autoencoder
    if stage is not None and not is_autoregressive(config):
        ranks = stage.zero.data or data * config.require_lm().parallel.model_parallel
        rows = tuple(_zero_cells(config, level, ranks) for level in range(4))
        title = f"{config.name}: memory per rank of autoencoder training on {counted(ranks, 'rank')}"
        tables.append(Table("memory_autoencoder", title, columns, rows))
    return Section(f"memory.{config.name}", f"{config.name}: memory", (), tuple(tables))


def communication_section(config: RunConfig) -> Section:
    """Bytes per step of every stage, by group and collective."""
    columns = (
        Column("stage", "Stage"),
        Column("group", "Group"),
        Column("size", "Ranks", "integer", spare=1),
        Column("operation", "Collective"),
        Column("what", "What"),
        Column("count", "Calls", "integer", spare=2),
        Column("bytes", "Tensor bytes", "bytes"),
        Column("wire", "Sent by a rank (ring)", "bytes"),
    )
    rows = tuple(
        (str(stage), t.group, t.size, t.operation.replace("_", "-"), t.what, t.count, t.bytes, t.wire)
        for stage, traffic in enumerate(communication.language_model(config, _data_parallel(config)))
        for t in traffic
    )
    title = f"{config.name}: communication"
    if not rows:
        return Section(f"communication.{config.name}", title, ("One rank: nothing is exchanged.",))
    table = Table("communication", f"{config.name}: bytes of one rank in one step", columns, rows)
    return Section(f"communication.{config.name}", title, (), (table,))


def _data_parallel(config: RunConfig) -> int:
    """The configured data-parallel size; 1 where it is left to the launcher."""
    return config.require_lm().parallel.data or 1


def _stage_parts(
    config: RunConfig, stage: int, num_stages: int, layers: tuple[int, ...]
) -> tuple[float, float, float, float, float]:
    per_token = FLOPS_PER_MAC / config.patch_size
    costs = layer_costs(config)
    first, last = stage == 0, stage == num_stages - 1
    inputs = sum(c.training for c in input_components(config)) if first else 0
    loss = sum(c.training for c in loss_components(config)) if last else 0
    encoder = sum(c.training for c in target_encoder(config)) if last else 0
    encoder += sum(c.training for c in input_encoder(config)) if first else 0
    head = costs.last - sum(c.training for c in (*loss_components(config), *target_encoder(config)))
    work = (inputs, sum(layers) * costs.layer, head if last else 0, loss, encoder)
    inputs_, backbone, head_, loss_, encoder_ = (per_token * macs for macs in work)
    return inputs_, backbone, head_, loss_, encoder_


def _memory_cells(name: str, held: Memory) -> tuple[Cell, ...]:
    return (name, *(getattr(held, part) for part in MEMORY_PARTS), held.total)


def _zero_cells(config: RunConfig, level: int, ranks: int) -> tuple[Cell, ...]:
    stage = config.autoencoder
    if stage is None:
        return ()
    zero = stage.zero.model_copy(update={"stage": level})
    changed = config.model_copy(update={"autoencoder": stage.model_copy(update={"zero": zero})})
    mark = " (this run)" if level == stage.zero.stage else ""
    return _memory_cells(f"ZeRO {level}{mark}", memory.autoencoder(changed, ranks))
