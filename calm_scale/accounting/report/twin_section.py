"""The proof by counting, as a section: what was compared, and any discrepancy."""

from __future__ import annotations

from collections.abc import Sequence

from calm_scale.accounting.report.document import Column, Section, Table
from calm_scale.accounting.twin import Comparison


def twin_section(name: str, comparisons: Sequence[Comparison]) -> Section:
    """Symbolic count beside torch's counter, for a tiny twin of the run."""
    rows = tuple(
        (c.what, c.symbolic, c.counted, c.symbolic - c.counted, c.note or ("" if c.agrees else "UNEXPLAINED"))
        for c in comparisons
    )
    columns = (
        Column("what", "What"),
        Column("symbolic", "Our count", "integer"),
        Column("counted", "torch's counter", "integer"),
        Column("difference", "Difference", "integer"),
        Column("note", "Why"),
    )
    text = (
        "A twin of this architecture at tiny widths was run forward and backward under torch's FLOP counter, attention "
        "as plain products; FLOPs per position."
    )
    table = Table("twin", f"{name}: count against execution", columns, rows)
    return Section(f"twin.{name}", f"{name}: proof by counting", (text,), (table,))
