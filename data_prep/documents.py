"""Records → texts. A block of good lines is decoded in one call; only a block with a bad line is taken apart, so
that every good record is kept and every bad one is counted by kind, file and true line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from data_prep.lines import BOM, LineBlock

# Leaving these out loses nothing, so they do not count against the limit on bad records.
HARMLESS = frozenset({"blank", "empty"})


@dataclass(frozen=True)
class Bad:
    """A record that is no document: its line (or row), why, and its raw bytes."""

    line: int
    kind: str
    raw: bytes


@dataclass
class Texts:
    """The documents of a block. ``read`` counts records; read = len(texts) + len(bad) + filtered."""

    texts: list[str] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    read: int = 0
    filtered: int = 0
    num_bytes: int = 0
    notes: Counter[str] = field(default_factory=Counter)


class SetFilter:
    """Which of the Pile's sets (``meta.pile_set_name``) are wanted."""

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include, self._exclude = frozenset(include), frozenset(exclude)
        self.active = bool(include or exclude)

    def wants(self, name: str | None) -> bool:
        """Whether a record of set ``name`` is kept."""
        return (not self._include or name in self._include) and name not in self._exclude


class RecordParser:
    """Parses JSON lines with the text in ``text_field``."""

    def __init__(self, text_field: str, sets: SetFilter) -> None:
        meta = msgspec.defstruct("Meta", [("pile_set_name", str | None, None)])
        fields: list[tuple[str, type] | tuple[str, object, object]] = [("text", str)]
        if sets.active:
            fields.append(("meta", meta | None, None))
        record = msgspec.defstruct("Record", fields, rename={"text": text_field}, gc=False)
        self._decoder = msgspec.json.Decoder(record)
        self._field, self._sets = text_field, sets

    def parse(self, block: LineBlock, lines_before: int = 0) -> Texts:
        """The documents of a block of whole lines."""
        data = block.data
        first = block.first_line + lines_before
        if block.overlong:
            return Texts(bad=[Bad(first, "line_too_long", data)], read=1, num_bytes=len(data))
        records = self._all_at_once(block)
        if records is None:
            return self._line_by_line(data, first)
        out = Texts(read=len(records), num_bytes=len(data))
        if self._sets.active:
            records = [r for r in records if self._wanted(r)]
            out.filtered = out.read - len(records)
        out.texts = [r.text for r in records]
        if any(map(_is_empty, out.texts)):
            return self._line_by_line(data, first)
        return out

    def _all_at_once(self, block: LineBlock) -> list[Any] | None:
        """Every record of the block, or ``None`` unless each line is exactly one good record."""
        if not block.every_line_starts_with(b"{"):
            return None
        try:
            records: list[Any] = self._decoder.decode_lines(block.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return records if len(records) == block.num_lines else None

    def _wanted(self, record: Any) -> bool:
        return self._sets.wants(record.meta.pile_set_name if record.meta else None)

    def _line_by_line(self, data: bytes, first: int) -> Texts:
        out = Texts(num_bytes=len(data))
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, first):
            out.read += 1
            stripped = line.strip(b" \t\r")
            if stripped.startswith(BOM):
                stripped = stripped[len(BOM) :]
                out.notes["byte_order_marks"] += 1
            try:
                record: Any = self._decoder.decode(stripped)
                text, wanted = record.text, not self._sets.active or self._wanted(record)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                kind, text, name = _look_closer(stripped, self._field)
                if kind:
                    out.bad.append(Bad(number, kind, line))
                    continue
                wanted = self._sets.wants(name)
            if not wanted:
                out.filtered += 1
            elif _is_empty(text):
                out.bad.append(Bad(number, "empty", line))
            else:
                out.texts.append(text)
        return out


def texts_of_rows(
    values: Iterable[object], names: Iterable[str | None], first: int, sets: SetFilter
) -> Texts:
    """The documents of table rows: one value and set name each."""
    out = Texts()
    for number, (value, name) in enumerate(zip(values, names, strict=True), first):
        out.read += 1
        if sets.active and not sets.wants(name):
            out.filtered += 1
        elif not isinstance(value, str):
            kind = (
                "null_text"
                if value is None
                else "invalid_utf8"
                if isinstance(value, bytes)
                else "text_not_string"
            )
            out.bad.append(Bad(number, kind, value if isinstance(value, bytes) else repr(value).encode()))
        elif _is_empty(value):
            out.bad.append(Bad(number, "empty", value.encode()))
        elif not value.isascii() and _has_surrogate(value):
            out.bad.append(Bad(number, "lone_surrogate", value.encode("utf-8", "surrogatepass")))
        else:
            out.texts.append(value)
            out.num_bytes += len(value)
    return out


def _is_empty(text: str) -> bool:
    return not text or text.isspace()


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def set_name(meta: object) -> str | None:
    """The set that a record's ``meta`` names; ``None`` where it is no object, or names none by a string."""
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    return name if isinstance(name, str) else None


def _look_closer(line: bytes, text_field: str) -> tuple[str, str, str | None]:
    """Of a line that is no plain record: why it is no document (else the empty string), its text, its set's name.

    A line whose text is good is a document, whatever its other fields hold.
    """
    value, kind = _object_of(line)
    if kind:
        return kind, "", None
    if text_field not in value:
        return "missing_text", "", None
    text = value[text_field]
    if text is None:
        return "null_text", "", None
    if not isinstance(text, str):
        return "text_not_string", "", None
    return "lone_surrogate" if _has_surrogate(text) else "", text, set_name(value.get("meta"))


def _object_of(line: bytes) -> tuple[dict[str, object], str]:
    """The JSON object that a line is, or the kind of bad record."""
    if not line:
        return {}, "blank"
    if b"\0" in line:
        return {}, "nul_byte"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return {}, "invalid_utf8"
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}, "broken_json"
    if end < len(text):
        return {}, "fused_json" if text[end:].lstrip()[:1] in ("{", "[") else "trailing_data"
    return (value, "") if isinstance(value, dict) else ({}, "not_object")
