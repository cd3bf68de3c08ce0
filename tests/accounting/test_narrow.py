"""Tables on a terminal of 80 columns: fewer columns or more lines, and no word or figure cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calm_scale.accounting.report.document import Column, Table, text_of
from calm_scale.accounting.report.render import fit
from calm_scale.cli.app import app

CONFIGS = Path(__file__).parents[2] / "configs"


def printed(command: list[str], columns: int) -> str:
    done = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["plan", str(CONFIGS / "runs" / "calm-xl.yaml"), "--nodes", "8", "--gpu", "h100"],
        ["flops", str(CONFIGS / "lm" / "calm-xl.yaml")],
    ],
    ids=["plan", "flops"],
)
def test_eighty_columns_break_no_word_and_no_figure(command: list[str]) -> None:
    wide, narrow = (printed(command, columns) for columns in (200, 80))
    assert "Left out at 80 columns" in narrow and "Left out" not in wide
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    own = re.compile(r"Left out at 80 columns:.*?show\s+them\.", re.DOTALL)
    words = [set(re.findall(r"[^ \n─]+", text)) for text in (own.sub("", narrow), wide)]
    assert words[0] <= words[1]


def test_what_cannot_be_spared_is_continued_below() -> None:
    columns = (Column("name", "Name"), *(Column(f"c{i}", f"Figure {i}", "integer") for i in range(6)))
    table = Table("t", "t", columns, tuple((f"row {n}", *([1234567] * 6)) for n in range(6)))
    pieces = fit(table, 40).tables
    assert [piece.columns[0].key for piece in pieces] == ["name"] * len(pieces)
    assert [column.key for piece in pieces for column in piece.columns[1:]] == [f"c{i}" for i in range(6)]
    assert text_of(pieces[-1].rows[-1][-1], "integer") == "1\u202f234\u202f567"
