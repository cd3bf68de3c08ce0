"""Whether earlier work in a folder is that of a plan: the same settings, and inputs with the same content.

The content decides, not the times: an input with another time of change is read again, and what is read is compared
with what the earlier work read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from data_prep.inputs import SAMPLE_BYTES, Input, identify_by_times
from data_prep.plan import Plan
from data_prep.record import SegmentRecord
from data_prep.sources import Reader

_NAMED = 6


def list_changes(
    plan: Plan, earlier: Mapping[str, Any], has_same_content: Callable[[int], bool | None]
) -> list[str]:
    """What differs between the settings of earlier work and a plan, each with both values; empty where nothing does.

    Args:
        has_same_content: whether input i holds what the earlier work read; ``None`` where that was not recorded.
            Asked for inputs with the same size, the same ends and another time of change.
    """
    old = [dict(item) for item in earlier.get("inputs", [])]
    inputs = _list_input_changes(plan, old, has_same_content)
    derived = {
        "inputs",
        *(("segment_bytes",) if inputs else ()),
    }  # the size of a segment follows from the inputs
    settings = _differences(
        {key: value for key, value in earlier.items() if key not in derived},
        {key: value for key, value in plan.settings.items() if key not in derived},
    )
    changes = settings + inputs
    more = len(changes) - _NAMED
    return changes[:_NAMED] + ([f"and {more} more"] if more > 0 else [])


def _list_input_changes(
    plan: Plan, old: list[dict[str, Any]], has_same_content: Callable[[int], bool | None]
) -> list[str]:
    keys = [(item.get("source"), item.get("name")) for item in old]
    new = [(item.source, item.name) for item in plan.inputs]
    if keys != new:
        gone = [f"{name} is not an input any more" for source, name in keys if (source, name) not in new]
        added = [f"{name} is a new input" for source, name in new if (source, name) not in keys]
        return gone + added or ["the order of the inputs"]
    changes = (_describe_change(plan, i, item, has_same_content) for i, item in enumerate(old))
    return [change for change in changes if change]


def _describe_change(
    plan: Plan, number: int, old: dict[str, Any], has_same_content: Callable[[int], bool | None]
) -> str:
    """How an input differs from what it was; empty where its content is the same."""
    new = plan.inputs[number]
    for key in ("kind", "size"):
        if old.get(key) != getattr(new, key):
            return f"{new.name}: {key} {old.get(key)} → {getattr(new, key)}"
    if (
        new.kind == "dataset" and old.get("mtime_ns") == 0
    ):  # known by its files' times, before their content was
        split = plan.prep.sources[new.source].split
        same = identify_by_times(new.name, split) == old.get("identity")
        return "" if same else f"{new.name}: its files or their times"
    if new.identity != old.get("identity"):
        return f"{new.name}: its {'commit' if new.kind == 'hub' else 'content'}"
    return "" if new.mtime_ns == old.get("mtime_ns") else _compare_content(new, old, has_same_content(number))


def _compare_content(new: Input, old: dict[str, Any], same_content: bool | None) -> str:
    """What to say of an input with the same size and ends and another time of change; empty where it is the same."""
    if same_content is None and not new.is_dataset and new.size <= 2 * SAMPLE_BYTES:
        return ""  # its ends are all it has
    if same_content is None and new.kind not in ("zst", "gz"):  # these end with a checksum of what is in them
        return (
            f"{new.name}: its time of change, and the earlier work did not record its content; if it is the same, "
            f"restore the time: touch -d @{old.get('mtime_ns', 0) / 1e9:.9f} FILE"
        )
    return "" if same_content is not False else f"{new.name}: its content, at the same size"


def has_content_of(plan: Plan, number: int, records: Mapping[int, SegmentRecord]) -> bool | None:
    """Whether the segments in ``records`` would be read as they were; ``None`` where a record does not say, or the
    pass that looks for duplicates read more than they tell."""
    if plan.prep.deduplicate or any(not record.content for record in records.values()):
        return None
    reader = _open(plan, number)
    return all(reader.digest(segment) == records[segment].content for segment in sorted(records))


def has_digest(plan: Plan, number: int, recorded: str) -> bool | None:
    """Whether an input, read to its end, has the digest that a finished prep recorded; ``None`` where it has none."""
    if not recorded:
        return None
    reader = _open(plan, number)
    digests: list[str] = []
    while not digests or not reader.ended:
        digests.append(reader.digest(len(digests)))
    return join_digests(digests) == recorded


def join_digests(segments: list[str]) -> str:
    """One digest of an input's segments, in order; empty where one is unknown."""
    return xxhash.xxh3_128_hexdigest(" ".join(segments).encode()) if all(segments) else ""


def _open(plan: Plan, number: int) -> Reader:
    item = plan.inputs[number]
    return Reader(item, plan.prep.sources[item.source], plan.segment_bytes)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Key paths whose values differ, with both values, shortened."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            d
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for d in _differences(a, b, f"{path}[{i}]")
        ]
    return [] if old == new else [f"{path}: {_shorten(old)} → {_shorten(new)}"]


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
