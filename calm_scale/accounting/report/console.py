"""A report on the terminal, with rich."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable

from calm_scale.accounting.report.document import Document, Table, text_of

PIPE_WIDTH = 180
TEXT_WIDTH = 120


def print_document(document: Document, console: Console | None = None) -> None:
    """Print every section; pictures are left to the HTML file. A pipe or file gets lines as wide as they need."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=max(console.width, PIPE_WIDTH))
    console.print(f"[bold]{escape(document.title)}[/bold]")
    for section in document.sections:
        console.print()
        console.rule(f"[bold]{escape(section.title)}[/bold]", align="left")
        for paragraph in section.text:
            console.print(escape(paragraph), width=min(console.width, TEXT_WIDTH), highlight=False)
        for table in section.tables:
            console.print(fitting(table, console))
            if table.note:
                console.print(
                    f"[dim]{escape(table.note)}[/dim]", width=min(console.width, TEXT_WIDTH), highlight=False
                )


def shortened(document: Document) -> Document:
    """What runs did, in a few lines: the headline and the attempts of each, without the rest of the report."""
    runs = [section for section in document.sections if section.key.startswith("run.")]
    kept = [
        replace(section, tables=tuple(table for table in section.tables if table.key.startswith("attempts_")))
        for section in runs
    ]
    return replace(document, sections=tuple(kept))


def fitting(table: Table, console: Console) -> RichTable:
    """The table, or the table on its side where that is what fits the terminal."""
    upright, sideways = rich_table(table), rich_table(table, sideways=True)
    widths = [_width(drawn, console) for drawn in (upright, sideways)]
    return upright if widths[0] <= console.width or widths[0] <= widths[1] else sideways


def _width(drawn: RichTable, console: Console) -> int:
    """Columns the table needs to show every cell on one line."""
    unbounded = console.options.update(width=10_000, max_width=10_000)
    return Measurement.get(console, unbounded, drawn).maximum


def rich_table(table: Table, *, sideways: bool = False) -> RichTable:
    """One table, numbers aligned right, totals under a rule. Sideways: a column for every row."""
    drawn = RichTable(title=escape(table.title), box=box.SIMPLE_HEAD, title_justify="left")
    rows = [
        [escape(text_of(cell, column.kind)) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    headings = [escape(column.heading) for column in table.columns]
    if sideways:
        drawn.add_column(headings[0])
        for row in rows:
            drawn.add_column(row[0], justify="right")
        for index, heading in enumerate(headings[1:], start=1):
            drawn.add_row(heading, *(row[index] for row in rows))
        return drawn
    for heading, column in zip(headings, table.columns, strict=True):
        text = column.kind == "text"
        drawn.add_column(
            heading, justify="left" if text else "right", overflow="fold" if text else "ellipsis"
        )
    for index, row in enumerate(rows):
        if table.num_total and index == len(rows) - table.num_total:
            drawn.add_section()
        drawn.add_row(*row)
    return drawn
