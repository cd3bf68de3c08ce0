"""A report as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from calm_scale.accounting.report.document import Cell, Document, Table, text_of


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
