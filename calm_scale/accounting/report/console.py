"""A report on the terminal, with rich."""

from __future__ import annotations

import os
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table as RichTable

from calm_scale.accounting.report import narrow
from calm_scale.accounting.report.document import Document, Table

PIPE_WIDTH = 180
TEXT_WIDTH = 120


def print_document(document: Document, console: Console | None = None) -> None:
    """Print every section; pictures are left to the HTML file. A pipe or file gets tables as wide as they need,
    unless COLUMNS says how wide."""
    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, width=PIPE_WIDTH)
    console.print(f"[bold]{escape(document.title)}[/bold]")
    for section in document.sections:
        console.print()
        console.print(Rule(f"[bold]{escape(section.title)}[/bold]", align="left"), width=_text_width(console))
        for paragraph in section.text:
            console.print(escape(paragraph), width=_text_width(console), highlight=False)
        for table in section.tables:
            console.print()
            print_table(table, console)


def print_table(table: Table, console: Console) -> None:
    """Print a table as the console has room for it, its note, and what was left out."""
    table = table.for_people()
    fitted = narrow.fit(table, console.width)
    console.print(f"[italic]{escape(table.title)}[/italic]", width=_text_width(console), highlight=False)
    for number, piece in enumerate(fitted.tables):
        if number:
            console.print()
        console.print(_drawn(piece, console.width))
    notes = [table.note] if table.note else []
    if fitted.left_out:
        names = ", ".join(fitted.left_out)
        notes.append(f"Left out at {console.width} columns: {names}. A wider terminal and --json show them.")
    for note in notes:
        console.print(f"[dim]{escape(note)}[/dim]", width=_text_width(console), highlight=False)


def _text_width(console: Console) -> int:
    return min(console.width, TEXT_WIDTH)


def shortened(document: Document) -> Document:
    """What runs did, in a few lines: the headline and the attempts of each, without the rest of the report."""
    runs = [section for section in document.sections if section.key.startswith("run.")]
    kept = [
        replace(section, tables=tuple(table for table in section.tables if table.key.startswith("attempts_")))
        for section in runs
    ]
    return replace(document, sections=tuple(kept))


def _drawn(table: Table, width: int) -> RichTable:
    """One table, numbers aligned right, totals under a rule."""
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column, size in zip(table.columns, narrow.widths(table, width), strict=True):
        drawn.add_column(
            escape(column.heading),
            justify="left" if column.kind == "text" else "right",
            overflow="fold",
            width=size,
        )
    cells = [narrow.cells_of(table, index) for index in range(len(table.columns))]
    for index, row in enumerate(zip(*cells, strict=True)):
        if table.num_total and index == len(table.rows) - table.num_total:
            drawn.add_section()
        drawn.add_row(*map(escape, row))
    return drawn
