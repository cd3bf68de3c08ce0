"""Which files a source names: globs and folders in sorted order, any case of extension."""

from __future__ import annotations

import glob
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash
import zstandard

from calm_scale.config.data import SourceConfig
from data_prep.errors import SourceError, SourceMistakeError
from data_prep.hub import commit_of

_KINDS = {
    ".jsonl": "plain",
    ".json": "plain",
    ".ndjson": "plain",
    ".jsonl.zst": "zst",
    ".json.zst": "zst",
    ".jsonl.zstd": "zst",
    ".jsonl.gz": "gz",
    ".json.gz": "gz",
    ".parquet": "parquet",
}
_EXPANSION = {"plain": 1.0, "zst": 3.2, "gz": 3.0, "parquet": 2.0}
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Input:
    """One input file (or one dataset): where, how to read it, and how to tell that it changed.

    ``text_bytes`` estimates the bytes of its text. ``identity`` is a hash of size and first and last 64 KiB (kind
    ``hub``: the commit).
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

    def check_unchanged(self) -> None:
        """Refuse an input that is not what it was when the plan was made.

        Raises:
            SourceError: it is gone, or its size or time of change differs.
        """
        if self.kind in ("dataset", "hub"):
            return
        try:
            stat = os.stat(self.name)  # noqa: PTH116
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error.strerror}") from None
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise SourceError(
                f"{self.name} changed while it was being read; rerun prep when nothing writes to it"
            )


def kind_of(path: Path) -> str | None:
    """How to read ``path``, by its extension in any case; ``None`` when it is no corpus file."""
    name = path.name.lower()
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)


def list_inputs(sources: tuple[SourceConfig, ...]) -> list[Input]:
    """Every input of every source, in the order in which its documents will stand.

    Raises:
        SourceMistakeError: a pattern matches nothing readable, or a file is named twice.
    """
    inputs: list[Input] = []
    seen: dict[str, int] = {}
    for number, source in enumerate(sources):
        if source.dataset is not None:
            inputs.append(_describe_dataset(number, source.dataset, source.split))
            continue
        for pattern in source.paths:
            for path in _expand(pattern):
                real = str(path.resolve())
                if real in seen:
                    if seen[real] == number:
                        continue
                    raise SourceMistakeError(
                        f"{path} belongs to two sources ({seen[real]} and {number}); name it once"
                    )
                seen[real] = number
                inputs.append(_describe(number, path))
    return inputs


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p) and not _hidden(p, path))
        if not found:
            raise SourceMistakeError(f"the folder {path} holds no file to read ({', '.join(_KINDS)})")
        return found
    if path.is_file():
        if kind_of(path) is None:
            raise SourceMistakeError(f"{path} has no known extension ({', '.join(_KINDS)})")
        return [path]
    matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True))  # noqa: PTH207
    found = [p for p in matches if p.is_file() and kind_of(p)]
    if not found:
        raise SourceMistakeError(f"prep.sources: nothing readable matches {pattern!r}; check the path")
    return found


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _describe_dataset(source: int, name: str, split: str) -> Input:
    """A dataset on disk is known by the names, sizes and times of its files; one on a hub by its commit."""
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith(("./", "../", "~")):
            raise SourceMistakeError(f"prep.sources: there is no dataset folder {name}; check the path")
        return Input(source, name, "hub", 0, 0, 0, commit_of(name, split))
    files = [(p, p.stat()) for p in sorted(folder.rglob("*")) if p.is_file() and not _hidden(p, folder)]
    facts = [f"{p.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}" for p, stat in files]
    size = sum(stat.st_size for _, stat in files)
    identity = xxhash.xxh3_128_hexdigest("\n".join([split, *facts]).encode())
    return Input(source, name, "dataset", size, 0, size, identity)


def _describe(source: int, path: Path) -> Input:
    kind = kind_of(path) or "plain"
    try:
        stat = path.stat()
        with path.open("rb") as file:
            head = file.read(_SAMPLE)
            file.seek(max(0, stat.st_size - _SAMPLE))
            tail = file.read(_SAMPLE)
    except OSError as error:
        raise SourceMistakeError(f"{path} cannot be read: {error.strerror}") from None
    identity = xxhash.xxh3_128_hexdigest(f"{stat.st_size} ".encode() + head + tail)
    text = _text_bytes(kind, head, stat.st_size)
    return Input(source, str(path), kind, stat.st_size, stat.st_mtime_ns, text, identity)


def _text_bytes(kind: str, head: bytes, size: int) -> int:
    if kind == "zst" and len(head) >= 18:
        try:
            frame = zstandard.get_frame_parameters(head)
        except zstandard.ZstdError:
            return int(size * _EXPANSION[kind])
        stated = frame.content_size
        if size < stated < 1 << 50:
            return int(stated)
    return int(size * _EXPANSION[kind])
