"""A report on the terminal, with rich."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from calm_scale.accounting.report.document import Document, Table, text_of


def print_document(document: Document, console: Console | None = None) -> None:
    """Print every section; pictures are left to the HTML file."""
    console = console or Console()
    console.print(f"[bold]{escape(document.title)}[/bold]")
    for section in document.sections:
        console.print()
        console.rule(f"[bold]{escape(section.title)}[/bold]", align="left")
        for paragraph in section.text:
            console.print(escape(paragraph))
        for table in section.tables:
            console.print(rich_table(table))
            if table.note:
                console.print(f"[dim]{escape(table.note)}[/dim]")


def rich_table(table: Table) -> RichTable:
    """One table, numbers aligned right, totals under a rule."""
    drawn = RichTable(title=escape(table.title), box=box.SIMPLE_HEAD, title_justify="left")
    for column in table.columns:
        drawn.add_column(escape(column.heading), justify="left" if column.kind == "text" else "right")
    for index, row in enumerate(table.rows):
        if table.num_total and index == len(table.rows) - table.num_total:
            drawn.add_section()
        cells = [text_of(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]
        drawn.add_row(*map(escape, cells))
    return drawn
