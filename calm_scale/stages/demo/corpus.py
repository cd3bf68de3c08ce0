"""A real corpus that every machine has: the running Python's standard library, written in the Pile's format."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

import xxhash
import zstandard

from data_prep.errors import PrepError

DEFAULT_BYTES = 18_000_000
_LARGEST_FILE = 400_000
_SET_NAMES = {
    "topics": "Python Topics",
    "docstrings": "Python Docstrings",
    "licences": "Licences",
    "sources": "Python Sources",
}


def write_demo_corpus(
    out_dir: Path, *, num_files: int = 4, target_bytes: int = DEFAULT_BYTES, documentation_only: bool = False
) -> list[Path]:
    """Write ``out_dir/NN.jsonl.zst`` with ``text`` and ``meta.pile_set_name`` on every line.

    Topics of the language reference, docstrings, licence texts and sources, without exact duplicates, in an
    order fixed by a hash of each text; the same interpreter gives the same bytes. ``documentation_only``
    leaves the sources out (about 5 MB of prose).

    Returns:
        The files, in order.

    Raises:
        PrepError: the standard library is not there as files.
    """
    chosen: dict[int, tuple[str, str]] = {}
    total = 0
    kinds = chain(_topics(), _licences(), _docstrings(), () if documentation_only else _sources())
    for kind, text in kinds:
        key = xxhash.xxh64_intdigest(text.encode())
        if not text.strip() or key in chosen:
            continue
        chosen[key] = (_SET_NAMES[kind], text)
        total += len(text.encode())
        if total >= target_bytes:
            break
    if len(chosen) < num_files:
        raise PrepError(
            f"no standard library sources under {_library()}: install them or give a corpus of your own"
        )
    ordered = [chosen[key] for key in sorted(chosen)]
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = [out_dir / f"{i:02d}.jsonl.zst" for i in range(num_files)]
    for i, path in enumerate(paths):
        lines = (
            json.dumps({"text": text, "meta": {"pile_set_name": name}}).encode() + b"\n"
            for name, text in ordered[i::num_files]
        )
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(lines))
        if path.exists() and path.read_bytes() == packed:
            continue  # a prep made from this file stays valid
        part = path.with_name(path.name + ".part")
        part.write_bytes(packed)
        part.replace(path)
    return paths


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files(*, tests: bool) -> Iterator[Path]:
    root = _library()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if {"site-packages", "dist-packages"} & set(inside) or (
            "test" in inside or "tests" in inside
        ) != tests:
            continue
        if path.stat().st_size <= _LARGEST_FILE:
            yield path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _topics() -> Iterator[tuple[str, str]]:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for text in topics.values():
        yield "topics", text


def _licences() -> Iterator[tuple[str, str]]:
    root = _library()
    for path in sorted([*root.glob("*LICENSE*"), *root.glob("**/site-packages/*.dist-info/**/*LICENSE*")]):
        if path.is_file():
            yield "licences", _read(path)


def _docstrings() -> Iterator[tuple[str, str]]:
    """All docstrings of a module in one document, in the order in which they stand."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _files(tests=False):
        try:
            nodes = [node for node in ast.walk(ast.parse(_read(path))) if isinstance(node, holders)]
        except (SyntaxError, ValueError):
            continue
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        joined = "\n\n".join(texts)
        if len(joined) > 200:
            yield "docstrings", joined + "\n"


def _sources() -> Iterator[tuple[str, str]]:
    for path in chain(_files(tests=False), _files(tests=True)):
        yield "sources", _read(path)
