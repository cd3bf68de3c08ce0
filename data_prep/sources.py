"""One way to read every kind of input: segment by segment, as checked texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import xxhash

from calm_scale.config.data import SourceConfig
from data_prep.documents import RecordParser, SetFilter, Texts, texts_of_rows
from data_prep.inputs import Input, list_inputs
from data_prep.lines import LineBlock, LineStream
from data_prep.tables import DatasetRows, ParquetRows


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
    def _rows(self) -> LineStream | ParquetRows | DatasetRows:
        """Opened by the first segment that is read, so that what is wrong with the file is found there."""
        item, source = self.item, self._source
        if item.is_dataset:
            commit = item.identity if item.kind == "hub" else None
            return DatasetRows(item.name, source.split, source.text_field, self._segment_bytes, commit)
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
