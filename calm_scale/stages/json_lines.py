"""Texts that a user hands over, in options of the command line and JSON lines, and JSON lines for the user."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calm_scale.config import ConfigError
from calm_scale.config.files import write_output


def given_texts(given: Sequence[str], jsonl: Path | None, key: str) -> list[str]:
    """The texts of the repeated option ``--key``, then those of the lines of ``jsonl``.

    Raises:
        ConfigError: names the option, or file and line, of what is no text.
    """
    for text in given:
        _refuse_half_characters(text, f"--{key}")
    return [*given, *(read_texts(jsonl, key) if jsonl is not None else [])]


def read_texts(path: Path, key: str) -> list[str]:
    """The text under ``key`` of every line; blank lines and a byte order mark are passed over.

    Raises:
        ConfigError: names file and line of what is not a JSON object with that text, or an empty file.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{path}:{number}: expected a JSON object such as {{"{key}": "The sea"}}')
        _refuse_half_characters(text, f"{path}:{number}")
        texts.append(text)
    if not texts:
        raise ConfigError(f"{path}: holds no {key}")
    return texts


def write_lines(rows: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    """One JSON object a line, to the file ``out`` in UTF-8, or to stdout; a stdout that is not UTF-8 gets escapes."""
    plain = out is None and not (sys.stdout.encoding or "").lower().startswith("utf")
    lines = "".join(json.dumps(row, ensure_ascii=plain, allow_nan=False) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(lines)
    else:
        write_output(out, lines)


def _refuse_half_characters(text: str, where: str) -> None:
    """Python reads a byte of the command line that is not UTF-8 as half a surrogate pair, too."""
    if text.isascii():
        return
    half = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
    if half is None:
        return
    if "\udc80" <= half <= "\udcff" and where.startswith("--"):
        raise ConfigError(f"{where}: the byte 0x{ord(half) - 0xDC00:02x} is not UTF-8; give UTF-8 text")
    raise ConfigError(f"{where}: half a surrogate pair (\\ud800 … \\udfff) is no character")
