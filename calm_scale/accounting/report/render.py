"""A report on the terminal (with rich), as Markdown, as JSON and as one HTML file."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table as RichTable

from calm_scale.accounting.report.document import Cell, Column, Document, Picture, Table, text_of

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
    fitted = fit(table, console.width)
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
    for column, size in zip(table.columns, widths(table, width), strict=True):
        drawn.add_column(
            escape(column.heading),
            justify="left" if column.kind == "text" else "right",
            overflow="fold",
            width=size,
        )
    cells = [cells_of(table, index) for index in range(len(table.columns))]
    for index, row in enumerate(zip(*cells, strict=True)):
        if table.num_total and index == len(table.rows) - table.num_total:
            drawn.add_section()
        drawn.add_row(*map(escape, row))
    return drawn


def to_markdown(document: Document) -> str:
    """GitHub-flavoured Markdown; pictures are named, not drawn."""
    lines = [f"# {document.title}", ""]
    for section in document.sections:
        lines += [f"## {section.title}", ""]
        for paragraph in section.text:
            lines += [paragraph, ""]
        for table in section.tables:
            lines += [*_markdown_table(table.for_people()), ""]
    return "\n".join(lines).rstrip() + "\n"


def to_json(document: Document) -> str:
    """Raw numbers: ``{title, sections: {key: {title, text, tables: {key: {columns, rows}}}}}``.

    Rows are objects by column key; FLOPs, bytes and seconds in base units, shares as fractions, null for n/a.
    """
    sections = {
        section.key: {
            "title": section.title,
            "text": list(section.text),
            "tables": {table.key: _json_table(table) for table in section.tables},
        }
        for section in document.sections
    }
    return json.dumps(
        {"title": document.title, "sections": sections}, indent=1, ensure_ascii=False, allow_nan=False
    )


def _markdown_table(table: Table) -> list[str]:
    rows = [
        [text_of(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    rules = ["---" if column.kind == "text" else "---:" for column in table.columns]
    lines = [
        f"**{table.title}**",
        "",
        _markdown_row([c.heading for c in table.columns]),
        _markdown_row(rules),
    ]
    lines += [_markdown_row(row) for row in rows]
    return [*lines, "", table.note] if table.note else lines


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _json_cell(cell: Cell) -> Cell:
    """JSON has no NaN and no infinity: such a number is not available."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _json_table(table: Table) -> dict[str, Any]:
    keys = [column.key for column in table.columns]
    return {
        "title": table.title,
        "columns": [{"key": c.key, "heading": c.heading, "kind": c.kind} for c in table.columns],
        "rows": [dict(zip(keys, map(_json_cell, row), strict=True)) for row in table.rows],
        "note": table.note,
    }


TEMPLATES = Path(__file__).parent.parent / "templates"


def to_html(document: Document) -> str:
    """The page; every text is escaped, pictures are embedded."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(text_of=text_of, data_uri=data_uri)
    return environment.get_template("report.html.j2").render(document=document)


def data_uri(picture: Picture) -> str:
    """The picture as an image source: its identifiers stay its own, and it can be copied as an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.draw().encode()).decode()


GAP = 2
"""Blanks between two columns."""
UNBROKEN = 24
"""Text up to this long stays on one line."""


@dataclass(frozen=True)
class Fitted:
    """What to print instead of a table, and the headings of the columns there was no room for."""

    tables: tuple[Table, ...]
    left_out: tuple[str, ...] = ()


def fit(table: Table, width: int) -> Fitted:
    """The table for lines of ``width`` characters: as it is, else on its side, else without columns that can be
    spared, else in pieces that all begin with its first column."""
    for drawn in (table, _sideways(table)):
        if _line(drawn) <= width:
            return Fitted((drawn,))
    fewer, left_out = _without_spare(table, width)
    return Fitted(_pieces(fewer, width), left_out)


def widths(table: Table, width: int) -> list[int]:
    """Characters of every column: at least what its words and figures need, more from the left while there is room."""
    found = [_least(table, index) for index in range(len(table.columns))]
    room = width - _line(table)
    for index, least in enumerate(found):
        grown = min(max(room, 0), _natural(table, index) - least)
        found[index] += grown
        room -= grown
    return found


def cells_of(table: Table, index: int) -> list[str]:
    """One column's cells as people read them."""
    return [text_of(row[index], table.columns[index].kind) for row in table.rows]


def _line(table: Table) -> int:
    """The shortest line on which the table stands with no word and no figure broken."""
    num_columns = len(table.columns)
    return sum(_least(table, index) for index in range(num_columns)) + GAP * (num_columns - 1)


def _least(table: Table, index: int) -> int:
    column, cells = table.columns[index], cells_of(table, index)
    kept = [cell_len(cell) for cell in cells]
    if column.kind == "text":
        kept = [max(min(length, UNBROKEN), _word(cell)) for cell, length in zip(cells, kept, strict=True)]
    return max([_word(column.heading), *kept])


def _natural(table: Table, index: int) -> int:
    return max(cell_len(text) for text in (table.columns[index].heading, *cells_of(table, index)))


def _word(text: str) -> int:
    return max((cell_len(word) for word in text.split()), default=0)


def _sideways(table: Table) -> Table:
    """A column for every row."""
    first, *others = range(len(table.columns))
    names = cells_of(table, first)
    columns = (
        Column("what", table.columns[first].heading),
        *(Column(str(number), name, "number") for number, name in enumerate(names)),
    )
    rows = tuple((table.columns[index].heading, *cells_of(table, index)) for index in others)
    return replace(table, columns=columns, rows=rows, num_total=0)


def _without_spare(table: Table, width: int) -> tuple[Table, tuple[str, ...]]:
    spare = sorted((column for column in table.columns if column.spare), key=lambda column: -column.spare)
    left_out: list[str] = []
    for column in spare:
        if _line(table) <= width:
            break
        left_out.append(column.heading)
        table = _only(table, [index for index, kept in enumerate(table.columns) if kept != column])
    return table, tuple(left_out)


def _pieces(table: Table, width: int) -> tuple[Table, ...]:
    pieces = [[0]]
    for index in range(1, len(table.columns)):
        wider = [*pieces[-1], index]
        if len(wider) > 2 and _line(_only(table, wider)) > width:
            pieces.append([0, index])
        else:
            pieces[-1] = wider
    return tuple(_only(table, piece) for piece in pieces)


def _only(table: Table, indices: Sequence[int]) -> Table:
    rows = tuple(tuple(row[index] for index in indices) for row in table.rows)
    return replace(table, columns=tuple(table.columns[index] for index in indices), rows=rows)
