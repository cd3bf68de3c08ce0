"""Which files a source names: globs and folders in sorted order, any case of extension."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from calm_scale.config.data import SourceConfig
from calm_scale.config.extensions import load_extension
from calm_scale.config.quantities import counted
from data_prep.errors import SourceError
from data_prep.inputs.tables import commit_of

_LINES = (".jsonl", ".json", ".ndjson")
_COMPRESSIONS = {"": "plain", ".zst": "zst", ".zstd": "zst", ".gz": "gz"}
_KINDS = {f"{lines}{end}": kind for lines in _LINES for end, kind in _COMPRESSIONS.items()} | {
    ".parquet": "parquet"
}
_NAMED = 3
"""Files that a line names of those it counts."""
_EXPANSION = {"plain": 1.0, "zst": 3.2, "gz": 3.0, "parquet": 2.0}
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Input:
    """One input file (or one dataset): where, how to read it, and how to tell that it changed.

    ``text_bytes`` estimates the bytes of its text. ``identity`` is a hash of size and first and last 64 KiB (a folder:
    of all its files; kind ``hub``: the commit). ``mtime_ns``: a folder has the sum over its files.
    """

    source: int
    name: str
    kind: str
    size: int
    mtime_ns: int
    text_bytes: int
    identity: str

    def as_dict(self) -> dict[str, int | str]:
        """Plain values, for the plan and the provenance."""
        return asdict(self)

    @property
    def is_dataset(self) -> bool:
        """Whether ``datasets`` reads it: from a folder, or from a hub."""
        return self.kind in ("dataset", "hub")

    @property
    def has_lines(self) -> bool:
        """Whether it is a file of JSON lines."""
        return self.kind in _COMPRESSIONS.values()

    def check_unchanged(self) -> None:
        """Refuse an input that is not what it was when the plan was made.

        Raises:
            SourceError: it is gone, or its size or time of change differs.
        """
        if self.is_dataset:
            return
        try:
            status = os.stat(self.name)  # noqa: PTH116
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error.strerror}") from None
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise SourceError(
                f"{self.name} changed while it was being read; rerun prep when nothing writes to it"
            )


def load_reader(source: SourceConfig) -> Callable[[Path], Iterable[Mapping[str, Any]]]:
    """The function that a source's ``kind`` names.

    Raises:
        ConfigError: there is none.
    """
    reader: Callable[[Path], Iterable[Mapping[str, Any]]] = load_extension(
        source.kind or "", "calm_scale.document_sources", "prep.sources.kind"
    )
    return reader


def kind_of(path: Path) -> str | None:
    """How to read ``path``, by its extension in any case; ``None`` when it is no corpus file."""
    name = path.name.lower()
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)


def ignore(line: str) -> None:
    """Takes a line for the user and drops it."""


def list_inputs(sources: tuple[SourceConfig, ...], tell: Callable[[str], object] = ignore) -> list[Input]:
    """Every input of every source, in the order in which its documents will stand.

    Files of no known extension are left out; ``tell`` is given one line a source that counts them.

    Raises:
        SourceError: a pattern matches nothing readable, a file or a dataset is named twice, something that may
            hold text cannot be looked into, or a name is not UTF-8.
    """
    inputs: list[Input] = []
    claims = _Claims()
    for number, source in enumerate(sources):
        _check_fields(number, source)
        if source.dataset is not None:
            inputs.append(_list_dataset(number, source.dataset, source.split, claims))
            continue
        if source.kind is not None:
            load_reader(source)
        unknown: dict[Path, None] = {}
        for pattern in source.paths:
            found = _expand(pattern)
            readable = [path for path in found if source.kind or kind_of(path)]
            unknown |= dict.fromkeys(path for path in found if path not in set(readable))
            if not readable:
                raise SourceError(_nothing(pattern, found), mistake=True)
            _check_names(readable)
            inputs += [
                _describe(number, path, source.kind or kind_of(path) or "plain")
                for path in readable
                if claims.claim(str(path.resolve()), number, _shown(path))
            ]
        if unknown:
            tell(
                f"prep.sources[{number}]: {_count_files(list(unknown))} left out, of no known extension "
                f"({', '.join(_KINDS)})"
            )
    return inputs


class _Claims:
    """Which source reads a file, or a name on a hub; ``None`` as its split is every split."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[str | None, int]] = {}

    def claim(self, key: str, source: int, what: str, split: str | None = None) -> bool:
        """Whether ``source`` is the first to read ``key``; ``False`` where it does so already.

        Raises:
            SourceError: another source reads it.
        """
        claims = self._claims.setdefault(key, {})
        for other_split, other in claims.items():
            if split is None or other_split is None or other_split == split:
                if other == source:
                    return False
                raise SourceError(
                    f"{what} belongs to two sources ({other} and {source}) and would be stored twice; name it once",
                    mistake=True,
                )
        claims[split] = source
        return True


def _check_fields(number: int, source: SourceConfig) -> None:
    if source.text_field == "meta" and (source.include_sets or source.exclude_sets):
        raise SourceError(
            f"prep.sources[{number}]: text_field is `meta`, where include_sets and exclude_sets look for the set's "
            "name: take the filters out, or name another field",
            mistake=True,
        )
    if not all(name.strip() for name in (source.paths if source.dataset is None else [source.dataset])):
        raise SourceError(
            f"prep.sources[{number}] holds an empty path: name a file, a glob or a folder (`.` is the current one)",
            mistake=True,
        )


def _nothing(pattern: str, found: list[Path]) -> str:
    """Why a pattern gives no input, of all the files that it names."""
    known = ", ".join(_KINDS)
    path = Path(pattern)
    if path.is_dir():
        return f"the folder {_shown(path)} holds no file to read ({known})"
    if found == [path]:
        return f"{_shown(path)} has no known extension ({known})"
    others = f": {_count_files(found)} of no known extension ({known})" if found else ""
    return f"prep.sources: nothing readable matches {pattern!r}{others}; check the path"


def _count_files(paths: list[Path]) -> str:
    names = [_shown(path) for path in paths[:_NAMED]] + ["…"] * (len(paths) > _NAMED)
    return f"{counted(len(paths), 'file')} ({', '.join(names)})"


def _shown(path: Path) -> str:
    """A path that can be printed, whatever its bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _expand(pattern: str) -> list[Path]:
    """The files that a path of a configuration names, sorted, whatever their extensions."""
    path = Path(pattern)
    matches = [path] if _status(path) else sorted(_matches(Path(), path.parts))
    entered: set[tuple[int, int]] = set()
    return sorted(file for match in matches for file in _files_at(match, entered))


def _matches(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """What the parts of a glob match below a folder. ``**`` at the end is the folders themselves.

    ``glob`` of the library passes over folders that it cannot list, and follows links that lead back many times.
    """
    if not parts:
        if _status(folder, follow=False):
            yield folder
        return
    first, rest = parts[0], parts[1:]
    if not glob.has_magic(first):
        yield from _matches(folder / first, rest)
    elif not _is_folder(folder):
        return
    elif first == "**":
        folders = [path for path, status in _below(folder, set()) if stat.S_ISDIR(status.st_mode)]
        for below in folders if rest else [folder]:
            yield from _matches(below, rest)
    else:
        for name in fnmatch.filter(_entries(folder), first):
            if not name.startswith(".") or first.startswith("."):
                yield from _matches(folder / name, rest)


def _files_at(path: Path, entered: set[tuple[int, int]]) -> Iterator[Path]:
    """The file ``path``, or the files below the folder ``path``: see ``_below``."""
    for file, status in _below(path, entered):
        if stat.S_ISREG(status.st_mode):
            yield file
        elif not stat.S_ISDIR(status.st_mode) and kind_of(file):
            raise SourceError(
                f"{_shown(file)} is no regular file: name one that holds its text", mistake=True
            )


def _below(path: Path, entered: set[tuple[int, int]]) -> Iterator[tuple[Path, os.stat_result]]:
    """``path`` and all that is below it but what is hidden; no folder twice, since links may lead back.

    Raises:
        SourceError: a folder cannot be read, or a link leads nowhere.
    """
    waiting = [path]
    while waiting:
        here = waiting.pop()
        status = _status(here)
        if status is None:
            raise _lost(here)
        if stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            waiting += [here / name for name in _entries(here) if not name.startswith(".")]
        yield here, status


def _is_folder(path: Path) -> bool:
    status = _status(path)
    if status is None and path.is_symlink():
        raise _lost(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _lost(path: Path) -> SourceError:
    if path.is_symlink():
        return SourceError(
            f"{_shown(path)} is a link to {_shown(path.readlink())}, which is not there: repair or remove it",
            mistake=True,
        )
    return SourceError(
        f"{_shown(path)} is not there any more; rerun prep when nothing changes its inputs", mistake=True
    )


def _check_names(paths: list[Path]) -> None:
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"the name {os.fsencode(path)!r} is not UTF-8, and no plan can hold it: rename it",
                mistake=True,
            ) from None


def _entries(folder: Path) -> list[str]:
    """Names in a folder, last one first."""
    try:
        return sorted(os.listdir(folder), reverse=True)  # noqa: PTH208
    except OSError as error:
        raise SourceError(
            f"the folder {_shown(folder)} cannot be read: {error.strerror}; make it readable or leave it out",
            mistake=True,
        ) from None


def _status(path: Path, *, follow: bool = True) -> os.stat_result | None:
    """``None`` where nothing is there; of a link what it leads to, or with ``follow=False`` its own.

    Raises:
        SourceError: it cannot be told.
    """
    try:
        return path.stat(follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise SourceError(
            f"{_shown(path)} cannot be read: {error.strerror}; check the path", mistake=True
        ) from None


def _list_dataset(source: int, name: str, split: str, claims: _Claims) -> Input:
    """A dataset on disk is known by the names and identities of its files; one on a hub by its commit."""
    folder = Path(name)
    status = _status(folder)
    if status is None or not stat.S_ISDIR(status.st_mode):
        if folder.is_absolute() or name.startswith(("./", "../", "~")):
            raise SourceError(
                f"prep.sources: there is no dataset folder {name}; check the path", mistake=True
            )
        commit = commit_of(name, split)
        claims.claim(f"hub {commit or name}", source, f"the dataset {name!r} (split {split!r})", split)
        return Input(source, name, "hub", 0, 0, 0, commit)
    files = sorted(_files_at(folder, set()))
    _check_names(files)
    _claim_dataset(source, folder, files, split, claims)
    described = [(path, *_identify(path)) for path in files]
    facts = [f"{path.relative_to(folder)} {identity}" for path, _, _, identity in described]
    size = sum(status.st_size for _, status, _, _ in described)
    times = sum(status.st_mtime_ns for _, status, _, _ in described)
    identity = xxhash.xxh3_128_hexdigest("\n".join([split, *facts]).encode())
    return Input(source, name, "dataset", size, times, size, identity)


def identify_by_times(folder: str, split: str) -> str:
    """The identity of a dataset folder by names, sizes and times of its files, as plans held it before."""
    states = [(path, path.stat()) for path in sorted(_files_at(Path(folder), set()))]
    facts = [f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    return xxhash.xxh3_128_hexdigest("\n".join([split, *facts]).encode())


def _claim_dataset(source: int, folder: Path, files: list[Path], split: str, claims: _Claims) -> None:
    """Claim the files that a split is read from: a saved dataset keeps each split in a folder, or has one alone."""
    saved_splits = (folder / "dataset_dict.json").exists()
    mine = [path for path in files if path.is_relative_to(folder / split)] if saved_splits else files
    whole = saved_splits or (folder / "state.json").exists()
    for path in mine:
        what = f"{path} of the dataset {str(folder)!r}"
        claims.claim(str(path.resolve()), source, what, None if whole else split)


def _describe(source: int, path: Path, kind: str) -> Input:
    status, head, identity = _identify(path)
    text = _text_bytes(kind, head, status.st_size)
    return Input(source, str(path), kind, status.st_size, status.st_mtime_ns, text, identity)


def _identify(path: Path) -> tuple[os.stat_result, bytes, str]:
    """A file's facts, its first bytes, and the hash of its size and its first and last bytes."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            head = file.read(SAMPLE_BYTES)
            file.seek(max(0, status.st_size - SAMPLE_BYTES))
            tail = file.read(SAMPLE_BYTES)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", mistake=True) from None
    return status, head, xxhash.xxh3_128_hexdigest(f"{status.st_size} ".encode() + head + tail)


def _text_bytes(kind: str, head: bytes, size: int) -> int:
    if kind == "zst" and len(head) >= 18:
        try:
            frame = zstandard.get_frame_parameters(head)
        except zstandard.ZstdError:
            return int(size * _EXPANSION.get(kind, 1.0))
        stated = frame.content_size
        if size < stated < 1 << 50:
            return int(stated)
    return int(size * _EXPANSION.get(kind, 1.0))
