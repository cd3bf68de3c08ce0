"""Rows of Parquet files and Hugging Face datasets, in numbered segments like the lines of a text file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from data_prep.documents import set_name
from data_prep.errors import CorruptSourceError, SourceError, SourceMistakeError
from data_prep.hub import open_dataset, reason

T = TypeVar("T")
_BATCH_ROWS = 2048
_BYTES_PER_ROW = 6000


@dataclass(frozen=True)
class RowBlock:
    """Values of the text column, their set names, and the 1-based number of the first row."""

    values: list[Any]
    sets: list[str | None]
    first_row: int

    def as_bytes(self) -> bytes:
        """The values and set names, for a hash."""
        parts = [value if isinstance(value, str) else repr(value) for value in (*self.values, *self.sets)]
        return "\x1f".join(parts).encode("utf-8", "surrogatepass")


class ParquetRows:
    """A Parquet file; a segment is a group of consecutive row groups of about ``segment_bytes``."""

    def __init__(self, path: Path, text_field: str, segment_bytes: int, *, with_sets: bool) -> None:
        import pyarrow
        import pyarrow.parquet

        self.ended = False
        self._path, self._field = path, text_field
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _kind(error)(f"{path} is truncated or no Parquet file: {error}") from None
        self._errors = (pyarrow.ArrowException, OSError)
        names = self._file.schema_arrow.names
        if text_field not in names:
            raise SourceMistakeError(
                f"{path} has no column {text_field!r} (it has: {', '.join(names)}); set text_field"
            )
        self._columns = [text_field, *(["meta"] if with_sets and "meta" in names else [])]
        self._groups = self._group(segment_bytes)

    def _group(self, segment_bytes: int) -> list[tuple[list[int], int]]:
        groups: list[tuple[list[int], int]] = []
        size, row = segment_bytes, 1
        for i in range(self._file.metadata.num_row_groups):
            facts = self._file.metadata.row_group(i)
            if size >= segment_bytes:
                groups.append(([], row))
                size = 0
            groups[-1][0].append(i)
            size += facts.total_byte_size
            row += facts.num_rows
        return groups

    def blocks(self, segment: int) -> Iterator[RowBlock]:
        """The rows of ``segment``."""
        self.ended = segment >= len(self._groups) - 1
        if segment >= len(self._groups):
            return
        members, row = self._groups[segment]
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=members, columns=self._columns):
                values = _strings(batch.column(0))
                metas = batch.column(1).to_pylist() if len(self._columns) > 1 else [None] * len(values)
                yield RowBlock(values, [set_name(meta) for meta in metas], row)
                row += len(values)
        except self._errors as error:
            raise _kind(error)(f"{self._path} is corrupt near row {row}: {error}") from None


def _strings(column: Any) -> list[Any]:
    """Values of a column; binary ones that are UTF-8 as text."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_one_string(value) for value in column]
    return [_as_text(value) if isinstance(value, bytes) else value for value in values]


def _kind(error: Exception) -> type[SourceError]:
    """What the system says (a file that is gone, a disk that fails) is not the file's own damage."""
    return SourceError if isinstance(error, OSError) and error.errno else CorruptSourceError


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _one_string(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return bytes(value.as_buffer())


class DatasetRows:
    """A Hugging Face dataset: a folder, or a name on a hub at a ``commit`` (streamed)."""

    def __init__(
        self, name: str, split: str, text_field: str, segment_bytes: int, commit: str | None = None
    ) -> None:
        self.ended = False
        self._name, self._split, self._field, self._commit = name, split, text_field, commit
        self._rows = max(1, segment_bytes // _BYTES_PER_ROW)
        self._stream: Iterator[dict[str, Any]] | None = None
        self._next_row = 0

    @cached_property
    def _dataset(self) -> Any:
        return open_dataset(self._name, self._split, self._commit)

    def blocks(self, segment: int) -> Iterator[RowBlock]:
        """Rows [segment · n, (segment + 1) · n)."""
        start, stop = segment * self._rows, (segment + 1) * self._rows
        rows = self._slice(start, stop)
        while True:
            values: list[Any] = []
            sets: list[str | None] = []
            for row in rows:
                if self._field not in row:
                    raise SourceMistakeError(
                        f"the dataset {self._name!r} has no field {self._field!r}: {sorted(row)}"
                    )
                values.append(row[self._field])
                sets.append(set_name(row.get("meta")))
                if len(values) == _BATCH_ROWS:
                    break
            if not values:
                return
            yield RowBlock(values, sets, start + 1)
            start += len(values)

    def _slice(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        dataset = self._dataset
        if hasattr(dataset, "__len__"):
            self.ended = stop >= len(dataset)
            for i in range(start, min(stop, len(dataset))):
                yield self._read(i, dataset.__getitem__, i)
            return
        if self._stream is None:
            self._stream = iter(dataset.skip(start))
            self._next_row = start
        while self._next_row < stop:
            row = self._read(self._next_row, next, self._stream, None)
            if row is None:
                self.ended = True
                return
            self._next_row += 1
            if self._next_row > start:
                yield row

    def _read(self, row: int, action: Callable[..., T], *arguments: Any) -> T:
        try:
            return action(*arguments)
        except Exception as error:  # of the library, of its file formats or of the network
            raise SourceError(
                f"the dataset {self._name!r} (split {self._split!r}) cannot be read at row {row + 1}: "
                f"{reason(error)}; rerun prep to go on where it was"
            ) from None
