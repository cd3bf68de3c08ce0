"""How a table fits a narrow line: wrapped at words, on its side, with fewer columns, or in pieces. Nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from calm_scale.accounting.report.document import Column, Table, text_of

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
