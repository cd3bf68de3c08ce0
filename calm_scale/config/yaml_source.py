"""Strict YAML: safe types only, `3e-4` is a number, a duplicate key is an error, every key knows its file:line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from calm_scale.config.base import ConfigError

KeyPath = tuple[str, ...]
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader whose floats follow YAML 1.2: `3e-4` and `1E5` are numbers, not strings."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class Source:
    """A parsed document and where each of its keys was written."""

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, base: Source) -> Source:
        """This document laid over a base: mappings merge key by key, everything else replaces."""
        return Source(merge(base.values, self.values), {**base.places, **self.places})


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge; ``top`` wins. A section whose ``kind`` changes is replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and value["kind"] != below.get("kind", value["kind"])
            merged[key] = dict(value) if other_kind else merge(below, value)
        else:
            merged[key] = value
    return merged


def parse_scalar(text: str) -> Any:
    """The value of a ``--set key=value`` argument, read as YAML."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ConfigError(f"--set: cannot read the value {text!r} as YAML: {error}") from None


def read(path: Path) -> Source:
    """Parse one file.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, or a duplicate key (with file:line).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Source({})
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:1: a configuration is a mapping of keys to values")
        places: dict[KeyPath, str] = {}
        _walk(node, path, (), places)
        return Source(loader.construct_document(node), places)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _walk(node: yaml.Node, path: Path, prefix: KeyPath, places: dict[KeyPath, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*prefix, str(key_node.value))
            here = f"{path}:{key_node.start_mark.line + 1}"
            if key in places:
                raise ConfigError(f"{here}: duplicate key `{'.'.join(key)}` (first at {places[key]})")
            places[key] = here
            _walk(value_node, path, key, places)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, path, (*prefix, str(index)), places)
