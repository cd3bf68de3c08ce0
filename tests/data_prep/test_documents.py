"""Bad records by kind and true line; good ones kept exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.inputs.lines import LineBlock
from data_prep.inputs.records import RecordParser, SetFilter, iterate_texts, texts_of_rows
from data_prep.inputs.tables import ParquetRows

CASES = [
    (b"", "blank"),
    (b"   ", "blank"),
    (b'{"text": "a"}{"text": "b"}', "fused_json"),
    (b'{"text": "a"} {"text": "b"}', "fused_json"),
    (b'{"text": "a"} x', "trailing_data"),
    (b'{"text": "cut', "broken_json"),
    (b"not json", "broken_json"),
    (b'{"text": NaN}', "text_not_string"),
    (b'{"meta": {}}', "missing_text"),
    (b'{"text": null}', "null_text"),
    (b'{"text": 5}', "text_not_string"),
    (b'{"text": ["a"]}', "text_not_string"),
    (b'["text", "a"]', "not_object"),
    (b'"text"', "not_object"),
    (b'{"text": ""}', "empty"),
    (b'{"text": " \\n\\t "}', "empty"),
    (b'{"text": "a\\ud800b"}', "lone_surrogate"),
    (b'{"text": "a\xff"}', "invalid_utf8"),
    (b'{"text": "a\xed\xa0\x80"}', "invalid_utf8"),
    (b'{"text": "a\0b"}', "nul_byte"),
    (b"\0\0\0\0", "nul_byte"),
    (b'{"text": ' + b"[" * 100_000, "broken_json"),
]
GOOD = "U+2028 \u2028, U+0085 \x85, NUL \x00, é 👍🏽"


@pytest.mark.parametrize(("line", "kind"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_one_bad_line_is_counted_and_its_neighbours_kept(line: bytes, kind: str) -> None:
    good = json.dumps({"text": GOOD}).encode()
    block = LineBlock(b"\n".join([good, line, good]) + b"\n", 7)
    parsed = RecordParser("text", SetFilter()).parse(block, 100)
    assert parsed.texts == [GOOD, GOOD]
    assert [(b.line, b.kind, b.raw) for b in parsed.bad] == [(108, kind, line)]
    assert parsed.read == 3


def test_fault_2_in_one_file(tmp_path: Path) -> None:
    record = b'{"text": "%d"}'
    data = (
        b"\xef\xbb\xbf" + record % 1 + b"\r\n"
        b"\r\n" + b"  \t\n" + record % 2 + b"\r\n" + record % 3 + record % 4 + b"\n"
        b'{"text": "cut\n' + json.dumps({"text": GOOD}, ensure_ascii=False).encode() + b"\n" + record % 5
    )
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    assert list(iterate_texts([path])) == ["1", "2", GOOD, "5"]


def test_fused_and_blank_lines_do_not_cancel_out() -> None:
    """Two records on one line and none on the next look like two lines with two records."""
    block = LineBlock(b'{"text":"a"}\n{"text":"b"}{"text":"c"}\n\n', 1)
    parsed = RecordParser("text", SetFilter()).parse(block)
    assert parsed.texts == ["a"]
    assert [b.kind for b in parsed.bad] == ["fused_json", "blank"]


def test_text_field_and_set_filters() -> None:
    lines = [{"body": str(i), "meta": {"pile_set_name": "ABC"[i % 3]}} for i in range(6)] + [{"body": "none"}]
    block = LineBlock(b"".join(json.dumps(line).encode() + b"\n" for line in lines), 1)
    only = RecordParser("body", SetFilter(include=["A", "C"])).parse(block)
    assert only.texts == ["0", "2", "3", "5"]
    assert only.filtered == 3
    without = RecordParser("body", SetFilter(exclude=["A"])).parse(block)
    assert without.texts == ["1", "2", "4", "5", "none"]
    assert without.read == len(without.texts) + without.filtered


OTHER_FIELDS = [
    b'"id": "\\ud800"',
    b'"\\udc00": 1',
    b'"score": NaN',
    b'"meta": "ABC"',
    b'"meta": ["ABC"]',
    b'"meta": {"pile_set_name": 7}',
    b'"meta": {"pile_set_name": ["A"]}',
]


@pytest.mark.parametrize("field", OTHER_FIELDS, ids=str)
def test_a_good_text_is_kept_whatever_the_other_fields_hold(field: bytes) -> None:
    good = b'{"text": "a", "meta": {"pile_set_name": "A"}}\n'
    block = LineBlock(good + b'{"text": "b", ' + field + b"}\n" + good, 1)
    for sets, texts in (
        (SetFilter(), ["a", "b", "a"]),
        (SetFilter(exclude=["B"]), ["a", "b", "a"]),
        (SetFilter(include=["A"]), ["a", "a"]),
    ):
        parsed = RecordParser("text", sets).parse(block)
        assert (parsed.texts, parsed.bad) == (texts, [])
        assert parsed.read == 3 == len(parsed.texts) + parsed.filtered


@pytest.mark.parametrize("field", OTHER_FIELDS, ids=str)
@pytest.mark.parametrize(
    ("text", "kind"), [(b'" "', "empty"), (b"5", "text_not_string"), (b'"\\ud800"', "lone_surrogate")]
)
def test_a_bad_text_is_told_whatever_the_other_fields_hold(field: bytes, text: bytes, kind: str) -> None:
    block = LineBlock(b'{"text": ' + text + b", " + field + b"}\n", 1)
    for sets in (SetFilter(), SetFilter(exclude=["A"])):
        parsed = RecordParser("text", sets).parse(block)
        assert [bad.kind for bad in parsed.bad] == [kind]


def test_the_set_of_a_table_row_is_named_by_a_string_or_not_at_all(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metas = [{"pile_set_name": [7]}, {"pile_set_name": None}]
    pq.write_table(pa.table({"text": ["a", "b"], "meta": metas}), tmp_path / "a.parquet")
    rows = next(ParquetRows(tmp_path / "a.parquet", "text", 1 << 20, with_sets=True).blocks(0))
    assert texts_of_rows(rows.values, rows.sets, 1, SetFilter(exclude=["A"])).texts == ["a", "b"]
