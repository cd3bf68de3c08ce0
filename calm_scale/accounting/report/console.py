"""A report on the terminal, with rich."""

from __future__ import annotations

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
            console.print(escape(paragraph), width=min(console.width, TEXT_WIDTH))
        for table in section.tables:
            console.print(fitting(table, console))
            if table.note:
                console.print(f"[dim]{escape(table.note)}[/dim]", width=min(console.width, TEXT_WIDTH))


def fitting(table: Table, console: Console) -> RichTable:
    """The table, or the table on its side where that is what fits the terminal."""
    upright = rich_table(table)
    if Measurement.get(console, console.options, upright).maximum <= console.width:
        return upright
    sideways = rich_table(table, sideways=True)
    fits = Measurement.get(console, console.options, sideways).maximum <= console.width
    return sideways if fits else upright


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
        drawn.add_column(heading, justify="left" if column.kind == "text" else "right")
    for index, row in enumerate(rows):
        if table.num_total and index == len(rows) - table.num_total:
            drawn.add_section()
        drawn.add_row(*row)
    return drawn
