"""Strict YAML: safe types only, plain decimal numbers, a duplicate key is an error, every key knows its file:line.

A word is a number or a truth value only where nobody reads it otherwise: ``3e-4`` is a number and ``true`` is a truth
value, but ``010``, ``1:30``, ``yes``, ``on`` and ``2026-01-01``, which YAML 1.1 turns into 8, 90, True, True and a
date, are texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from calm_scale.config.errors import ConfigError

KeyPath = tuple[str, ...]
_MOST_KEYS = 100_000
"""More of them come from aliases of aliases, which multiply."""
_TAG = "tag:yaml.org,2002:"
_DIGITS = "-+0123456789"
_WHOLE = "[-+]?(?:0|[1-9][0-9_]*)"
_EXPONENT = "(?:[eE][-+]?[0-9]+)"
_PLAIN: tuple[tuple[str, str, list[str]], ...] = (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _WHOLE, list(_DIGITS)),
    ("float", rf"{_WHOLE}\.?{_EXPONENT}|{_WHOLE}\.", list(_DIGITS)),
    ("float", rf"(?:{_WHOLE}|[-+]?)\.[0-9][0-9_]*{_EXPONENT}?", list(_DIGITS + ".")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", "<<", ["<"]),
)
"""What an unquoted word may mean besides itself: tag, form, first characters."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads an unquoted word as :data:`_PLAIN` says."""


_Loader.yaml_implicit_resolvers = {}


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which this loader, or one of YAML 1.1, would read as something else."""


for _name, _form, _first in _PLAIN:
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_form})\Z"), _first)


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


def with_value(values: Any, keys: KeyPath, value: Any) -> Any:
    """A document with ``value`` laid over what stands at ``keys``; a number among them counts the items of a list.

    Raises:
        ValueError: the list has no such item.
    """
    if not keys:
        return merge(values, value) if isinstance(values, Mapping) and isinstance(value, Mapping) else value
    key, deeper = keys[0], keys[1:]
    if isinstance(values, list) and key.isdigit():
        if int(key) >= len(values):
            raise ValueError(f"item {key} does not exist, the list has {len(values)} (the first is 0)")
        return [with_value(item, deeper, value) if i == int(key) else item for i, item in enumerate(values)]
    below = values if isinstance(values, Mapping) else {}
    return merge(below, {key: with_value(below.get(key), deeper, value)})


def parse_value(text: str, origin: str) -> Any:
    """The value of an option ``origin``, read like the value of a key in a file.

    Raises:
        ConfigError: it is not YAML.
    """
    return _parse(text, lambda _: origin)[0]


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
    values, places = _parse(text, lambda line: f"{path}:{line}")
    if values is None:
        return Source({})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: a configuration is a mapping of keys to values")
    return Source(values, places)


def _parse(text: str, place: Callable[[int], str]) -> tuple[Any, dict[KeyPath, str]]:
    """The document of a text, and where each of its keys stands."""
    places: dict[KeyPath, str] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, places
        _walk(node, place, (), places, ())
        return loader.construct_document(node), places
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{place(mark.line + 1 if mark else 1)}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nested without end
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{place(1)}: cannot be read as YAML: {error}") from None


def _walk(
    node: yaml.Node,
    place: Callable[[int], str],
    prefix: KeyPath,
    places: dict[KeyPath, str],
    around: tuple[yaml.Node, ...],
) -> None:
    """Note the place of every key below ``node``, which lies inside of the nodes ``around``."""
    line = place(node.start_mark.line + 1)
    if any(node is outer for outer in around):
        raise ConfigError(f"{line}: `{'.'.join(prefix)}`: an alias to something that contains it has no end")
    if len(places) > _MOST_KEYS:
        raise ConfigError(f"{line}: aliases of aliases make more than {_MOST_KEYS:,} keys")
    inside = (*around, node)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*prefix, str(key_node.value))
            here = place(key_node.start_mark.line + 1)
            if key in places:
                raise ConfigError(f"{here}: duplicate key `{'.'.join(key)}` (first at {places[key]})")
            places[key] = here
            _walk(value_node, place, key, places, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            key = (*prefix, str(index))
            places[key] = place(item.start_mark.line + 1)
            _walk(item, place, key, places, inside)
