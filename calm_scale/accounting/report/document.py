"""A report as data: sections of tables and pictures, rendered by console, Markdown, HTML and JSON alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from calm_scale.config.quantities import bytes_text, flops_text, scaled, seconds_text

Kind = Literal["text", "integer", "number", "flops", "percent", "deviation", "bytes", "seconds", "money"]
Cell = str | int | float | None

UNAVAILABLE = "n/a"


@dataclass(frozen=True)
class Column:
    """One column: its key in JSON, its heading, how its cells are written.

    ``spare`` says which columns a narrow terminal leaves out, the highest first; 0 is never left out. One
    ``for_programs`` is in JSON only.
    """

    key: str
    heading: str
    kind: Kind = "text"
    spare: int = 0
    for_programs: bool = False


@dataclass(frozen=True)
class Table:
    """Raw cells under typed columns. The last ``num_total`` rows are totals. People see the first ``num_shown`` rows
    (None: all), programs every one."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    num_total: int = 0
    num_shown: int | None = None

    def for_people(self) -> Table:
        """What the terminal, Markdown and HTML show of it; the title says how many rows of how many."""
        kept = [index for index, column in enumerate(self.columns) if not column.for_programs]
        rows = self.rows[: self.num_shown]
        return replace(
            self,
            columns=tuple(self.columns[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in rows),
            title=self.title if self.num_shown is None else f"{self.title} ({len(rows)} of {len(self.rows)})",
            num_shown=None,
        )


@dataclass(frozen=True)
class Picture:
    """A picture and what it shows in words; drawn as SVG only where a rendering needs it."""

    key: str
    title: str
    alt: str
    draw: Callable[[], str]


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph or two, tables and pictures."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    sections: tuple[Section, ...]


def text_of(cell: Cell, kind: Kind) -> str:
    """One cell as people read it. None is ``n/a``, never a number."""
    if cell is None:
        return UNAVAILABLE
    if isinstance(cell, str) or kind == "text":
        return str(cell)
    return _WRITERS[kind](float(cell))


_WRITERS = {
    "integer": lambda value: f"{value:,.0f}".replace(",", "\u202f"),
    "number": lambda value: f"{value:.3g}" if abs(value) < 1000 else scaled(value, ("", "k", "M", "G", "T")),
    "flops": flops_text,
    "percent": lambda value: f"{100 * value:.1f} %",
    "deviation": lambda value: f"{100 * value:+.1f} %",
    "bytes": bytes_text,
    "seconds": seconds_text,
    "money": lambda value: f"{value:,.2f}".replace(",", "\u202f"),
}
