"""`calm-scale ckpt`: look at checkpoints from one process; only conversions import torch."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from calm_scale.accounting.report.document import Cell, Column, Table
from calm_scale.accounting.report.render import print_table
from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.file_list import SHARDS
from calm_scale.checkpoint.judge import Entry, inventory, resumable, verify
from calm_scale.checkpoint.targets import resume_targets
from calm_scale.config import CalmScaleError, ConfigError
from calm_scale.config.errors import EXIT_ERROR, EXIT_OK
from calm_scale.config.quantities import bytes_text
from calm_scale.config.run_folder import TRAINED, RunFolder


def list_checkpoints(run: Path, *, read_all: bool = False) -> int:
    """Print every step folder of a run (both stages) or of one checkpoints folder. ``read_all`` compares every
    checksum; without it names and sizes are looked at."""
    folders = [path for stage in TRAINED if (path := RunFolder(run).stage(stage).checkpoints).is_dir()] or [
        run
    ]
    console = Console()
    shown = 0
    for folder in folders:
        entries = inventory(folder, deep=read_all)
        if entries and shown:
            console.print()
        if entries:
            print_table(_table(folder, entries), console)
        shown += len(entries)
    if not shown:
        raise ConfigError(f"{run}: no checkpoints there; name a run folder or a `checkpoints` folder")
    return EXIT_OK


def print_newest(checkpoints: Path, *, every: bool = False) -> int:
    """Print the newest step that may be resumed (``every``: all of them, newest first, one a line), or -1.

    The job scripts call it progress, and evaluate the steps it names.
    """
    found = [entry.step for entry in resumable(inventory(checkpoints))] or [-1]
    print(*(found if every else found[:1]), sep="\n")
    return EXIT_OK


def inspect_checkpoint(checkpoint: Path) -> int:
    """Print the identity card."""
    entry = verify(checkpoint)
    if entry.card is None:
        raise CalmScaleError(f"{checkpoint}: {entry.reason}")
    console = Console()
    card = entry.card.model_dump(mode="json")
    config = card.pop("config")
    console.print_json(json.dumps(card))
    console.print(f"configuration: hash {entry.card.config_hash}, run {config.get('name')}")
    console.print(_resumes_into(entry.card))
    return EXIT_OK


def verify_checkpoint(checkpoint: Path) -> int:
    """Read every byte and compare sizes and checksums. 0 when whole, 1 with the reason otherwise."""
    entry = verify(checkpoint)
    if entry.is_whole:
        note = f"; {entry.reason}" if entry.reason else ""
        Console().print(
            f"{checkpoint}: complete, every checksum verified ({bytes_text(entry.size)}){note}",
            soft_wrap=True,
        )
        return EXIT_OK
    Console(stderr=True).print(f"{checkpoint}: {entry.state}: {entry.reason}", soft_wrap=True, markup=False)
    return EXIT_ERROR


def shards_of(checkpoint: Path) -> tuple[Card, Path]:
    """The card and the shard folder of a checkpoint that verifies, of whatever run.

    Raises:
        CalmScaleError: it is damaged, unfinished or suspect; says what is wrong.
    """
    entry = verify(checkpoint)
    if entry.state not in ("complete", "foreign") or entry.card is None:
        why = entry.reason if entry.state == "suspect" else f"{entry.state}: {entry.reason}"
        raise CalmScaleError(f"{checkpoint}: {why}; take another step (`calm-scale ckpt ls` lists them)")
    return entry.card, checkpoint / SHARDS


def _table(folder: Path, entries: list[Entry]) -> Table:
    columns = (
        Column("step", "step", "integer"),
        Column("age", "age", "seconds"),
        Column("size", "size", "bytes"),
        Column("state", "state"),
        Column("verified", "verified"),
        Column("loss", "loss", "number"),
        Column("heldout_loss", "held-out loss", "number"),
        Column("layout", "written by"),
    )
    faults = [f"step {entry.step}: {entry.reason}" for entry in entries if entry.reason]
    rows = tuple(map(_cells, entries))
    return Table("checkpoints", str(folder), columns, rows, note="\n".join(faults))


def _cells(entry: Entry) -> tuple[Cell, ...]:
    unread = "sizes" if entry.is_whole else "no"
    return (
        entry.step,
        entry.age_seconds,
        entry.size,
        entry.state,
        {True: "every byte", False: "no", None: unread}[entry.verified],
        _metric(entry.card, "loss"),
        _metric(entry.card, "eval/loss"),
        entry.card.layout if entry.card else "",
    )


def _metric(card: Card | None, name: str) -> str:
    value = card.metrics.get(name) if card else None
    return "" if value is None else f"{value:.4f}"


def _resumes_into(card: Card) -> RichTable:
    """Every layout this checkpoint can go on in, and what stays bitwise."""
    targets = resume_targets(card)
    table = RichTable(title="can resume as", title_justify="left", show_header=False)
    table.add_row("bit for bit", card.layout)
    rows = (
        ("tensor", targets.tensor),
        ("pipeline", targets.pipeline),
        ("data, same global batch", targets.data),
        ("ZeRO stage", targets.zero_stages),
    )
    for name, sizes in rows:
        if sizes:
            table.add_row(name, ", ".join(map(str, sizes)))
    for note in targets.notes:
        table.add_row("holds", note)
    return table
