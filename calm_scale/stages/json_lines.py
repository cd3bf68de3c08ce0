"""Texts that a user hands over as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from calm_scale.config import ConfigError


def read_texts(path: Path, key: str) -> list[str]:
    """The text under ``key`` of every line; blank lines are passed over.

    Raises:
        ConfigError: names file and line of what is not a JSON object with that text, or an empty file.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{path}:{number}: expected a JSON object such as {{"{key}": "The sea"}}')
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{path}:{number}: half a surrogate pair (\\ud800 … \\udfff) is no character")
        texts.append(text)
    if not texts:
        raise ConfigError(f"{path}: holds no {key}")
    return texts
