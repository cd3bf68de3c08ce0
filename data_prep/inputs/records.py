"""Records → texts. A block of good lines is decoded in one call; only a block with a bad line is taken apart, so
that every good record is kept and every bad one is counted by kind, file and true line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from calm_scale.config.data import SourceConfig
from data_prep.inputs import Input, list_inputs, load_reader
from data_prep.inputs.lines import BOM, LineBlock, LineStream
from data_prep.inputs.tables import ParquetRows, RecordFile, RecordRows, open_dataset, set_name

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


class Reader:
    """Reads one input's segments in increasing order.

    Attributes:
        ended: after ``texts(k)``: nothing follows segment k, and the input's end was verified.
        content: after ``texts(k)``: hash of the lines or rows of segment k, good or bad.
    """

    def __init__(self, item: Input, source: SourceConfig, segment_bytes: int, first_segment: int = 0) -> None:
        self.item = item
        self._source, self._segment_bytes, self._first_segment = source, segment_bytes, first_segment
        self._sets = SetFilter(source.include_sets, source.exclude_sets)
        self._parser = RecordParser(source.text_field, self._sets)
        self.content = ""

    @cached_property
    def _rows(self) -> LineStream | ParquetRows | RecordRows:
        """Opened by the first segment that is read, so that what is wrong with the file is found there."""
        item, source = self.item, self._source
        if item.is_dataset:
            commit = item.identity if item.kind == "hub" else None
            what = f"the dataset {item.name!r} (split {source.split!r})"
            rows = partial(open_dataset, item.name, source.split, commit)
            return RecordRows(what, rows, source.text_field, self._segment_bytes)
        if source.kind is not None:
            what = f"{item.name} (kind {source.kind})"
            rows = partial(RecordFile, load_reader(source), Path(item.name))
            return RecordRows(what, rows, source.text_field, self._segment_bytes)
        if item.kind == "parquet":
            return ParquetRows(
                Path(item.name), source.text_field, self._segment_bytes, with_sets=self._sets.active
            )
        return LineStream(Path(item.name), item.kind, self._segment_bytes, self._first_segment)

    @property
    def ended(self) -> bool:
        """Whether the input ended with the segment read last."""
        return self._rows.ended

    @property
    def notes(self) -> Counter[str]:
        """What reading found out about the file so far."""
        return self._rows.stream.notes if isinstance(self._rows, LineStream) else Counter()

    def texts(self, segment: int) -> Iterator[Texts]:
        """The documents of ``segment``, a few MB at a time.

        Raises:
            SourceError: the input is truncated, corrupt, or not what it was when the plan was made.
        """
        rows = self._rows
        read = xxhash.xxh3_128()
        if isinstance(rows, LineStream):
            for block in rows.blocks(segment):
                read.update(block.data)
                parsed = self._parser.parse(block)
                if parsed.bad and rows.lines_skipped:
                    parsed = self._parser.parse(block, rows.lines_skipped)
                yield parsed
        else:
            for table in rows.blocks(segment):
                read.update(table.as_bytes())
                yield texts_of_rows(table.values, table.sets, table.first_row, self._sets)
        self.content = read.hexdigest()
        self.item.check_unchanged()

    def digest(self, segment: int) -> str:
        """The ``content`` of ``segment``, without looking for documents in it."""
        rows = self._rows
        read = xxhash.xxh3_128()
        for block in rows.blocks(segment):
            read.update(block.data if isinstance(block, LineBlock) else block.as_bytes())
        return read.hexdigest()


def iterate_texts(paths: Iterable[Path | str], text_field: str = "text") -> Iterator[str]:
    """Every good document of the files, in order."""
    source = SourceConfig(paths=tuple(str(p) for p in paths), text_field=text_field)
    for item in list_inputs((source,)):
        reader = Reader(item, source, segment_bytes=1 << 62)
        for block in reader.texts(0):
            yield from block.texts
