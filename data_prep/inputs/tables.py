"""Rows of Parquet files and Hugging Face datasets, in numbered segments like the lines of a text file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from data_prep.errors import CorruptSourceError, SourceError

T = TypeVar("T")
_BATCH_ROWS = 2048
_BYTES_PER_ROW = 6000
OPEN_SECONDS = 60.0


def set_name(meta: object) -> str | None:
    """The set that a record's ``meta`` names; ``None`` where it is no object, or names none by a string."""
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    return name if isinstance(name, str) else None


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
            raise SourceError(
                f"{path} has no column {text_field!r} (it has: {', '.join(names)}); set text_field",
                mistake=True,
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


class RecordFile:
    """A file that a user's function reads: ``read(path)`` yields its records as mappings, the same ones each time."""

    def __init__(self, read: Callable[[Path], Iterable[Mapping[str, Any]]], path: Path) -> None:
        self._read, self._path = read, path

    def skip(self, count: int) -> Iterator[Mapping[str, Any]]:
        """The records after the first ``count``."""
        return islice(self._read(self._path), count, None)


class RecordRows:
    """Rows of a Hugging Face dataset or of a ``RecordFile``; a segment is a fixed number of rows.

    Args:
        what: names the input in messages.
        open_rows: gives the dataset or file.
    """

    def __init__(self, what: str, open_rows: Callable[[], Any], text_field: str, segment_bytes: int) -> None:
        self.ended = False
        self._what, self._open_rows, self._field = what, open_rows, text_field
        self._rows = max(1, segment_bytes // _BYTES_PER_ROW)
        self._stream: Iterator[Mapping[str, Any]] | None = None
        self._held: Mapping[str, Any] | None = None
        self._next_row = 0

    @cached_property
    def _dataset(self) -> Any:
        return self._open_rows()

    def blocks(self, segment: int) -> Iterator[RowBlock]:
        """Rows [segment · n, (segment + 1) · n)."""
        start, stop = segment * self._rows, (segment + 1) * self._rows
        rows = self._slice(start, stop)
        while True:
            values: list[Any] = []
            sets: list[str | None] = []
            for row in rows:
                if self._field not in row:
                    raise SourceError(
                        f"{self._what} has no field {self._field!r}: {sorted(row)}; set text_field",
                        mistake=True,
                    )
                values.append(row[self._field])
                sets.append(set_name(row.get("meta")))
                if len(values) == _BATCH_ROWS:
                    break
            if not values:
                return
            yield RowBlock(values, sets, start + 1)
            start += len(values)

    def _slice(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        dataset = self._dataset
        if hasattr(dataset, "__len__"):
            self.ended = stop >= len(dataset)
            for i in range(start, min(stop, len(dataset))):
                yield self._read(i, dataset.__getitem__, i)
            return
        if self._stream is None:
            self._stream = iter(self._read(start, dataset.skip, start))
            self._next_row = start
        while self._next_row < stop and (row := self._take()) is not None:
            self._next_row += 1
            if self._next_row > start:
                yield row
        self._held = self._take()  # whether another segment follows
        self.ended = self._held is None

    def _take(self) -> Mapping[str, Any] | None:
        """The next row of the stream; ``None`` at its end."""
        held, self._held = self._held, None
        return self._read(self._next_row, next, self._stream, None) if held is None else held

    def _read(self, row: int, action: Callable[..., T], *arguments: Any) -> T:
        try:
            return action(*arguments)
        except SourceError:
            raise
        except (
            Exception
        ) as error:  # of the library, of its file formats, of the network or of a user's function
            raise SourceError(
                f"{self._what} cannot be read at row {row + 1}: {reason(error)}; rerun prep to go on where it was"
            ) from None


def commit_of(name: str, split: str) -> str:
    """The newest commit of a dataset on a hub; the empty string where the library works offline, from its cache.

    Raises:
        SourceError: no answer, or no such dataset.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return ""
    return _reached(name, split, lambda: huggingface_hub.HfApi().dataset_info(name).sha or "")


def open_dataset(name: str, split: str, commit: str | None) -> Any:
    """A dataset of ``datasets``: the folder ``name``, or where there is a ``commit`` the name on a hub, streamed.

    Raises:
        SourceError: it cannot be opened; ``SourceError`` where it has no such split, no rows, or is not there.
    """
    import datasets

    datasets.disable_progress_bars()
    if commit is None:
        return _opened(name, split)
    return _reached(
        name,
        split,
        lambda: datasets.load_dataset(name, split=split, revision=commit or None, streaming=True),
    )


def _opened(name: str, split: str) -> Any:
    """A dataset of a folder: saved by ``save_to_disk``, or files that ``load_dataset`` streams."""
    import datasets
    import pyarrow

    what = f"the dataset {name!r} (split {split!r})"
    try:
        if _was_saved(Path(name)):
            return _load_saved(Path(name), split, what)
        return datasets.load_dataset(name, split=split, streaming=True)
    except SourceError:
        raise
    except (pyarrow.ArrowException, json.JSONDecodeError) as error:
        raise SourceError(_damaged(what, error)) from None
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SourceError(_misnamed(what, error), mistake=True) from None
    except Exception as error:  # of the library or of its file formats
        raise SourceError(_damaged(what, error)) from None


def _load_saved(folder: Path, split: str, what: str) -> Any:
    import datasets

    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise SourceError(f"{what} has no such split; it has: {', '.join(splits)}", mistake=True)
        folder /= split
    if not json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
        raise SourceError(f"{what} holds no rows: name one that does, or leave it out", mistake=True)
    return datasets.load_from_disk(str(folder))


def reason(error: Exception) -> str:
    """The first line of what a library says went wrong."""
    return str(error).partition("\n")[0].rstrip(". ") or type(error).__name__


def _was_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_info.json", "state.json", "dataset_dict.json"))


def _misnamed(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {reason(error)}; check its name and its split"


def _damaged(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {reason(error)}; is it whole? Copy it or save it again"


def _reached(name: str, split: str, action: Callable[[], T]) -> T:
    from huggingface_hub.errors import RepositoryNotFoundError

    what = f"the dataset {name!r} (split {split!r})"
    try:
        return _within(OPEN_SECONDS, action)
    except RepositoryNotFoundError:
        raise SourceError(
            f"{what} does not exist or is gated: check its name, or log in with `hf auth login`",
            mistake=True,
        ) from None
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SourceError(_misnamed(what, error), mistake=True) from None
    except TimeoutError:
        raise SourceError(
            f"{what} did not answer within {OPEN_SECONDS:.0f} s: is there a network on this node? Download it where "
            "there is one and name the folder"
        ) from None
    except Exception as error:  # the library raises many kinds; all mean the same to the user
        raise SourceError(
            f"{what} cannot be read: {reason(error)}; is the name right, and is there a network on this node?"
        ) from None


def _within(seconds: float, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises; without a network the library's own retries may take many minutes.

    Raises:
        TimeoutError: it is not done after ``seconds``; it is left behind in a thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
