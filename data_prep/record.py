"""What one finished segment gave: its shards, its counts, and what it left for the end."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from data_prep.manifest import ShardEntry


class SplitOutput(BaseModel):
    """One split's part of a segment. ``tail_tokens`` ids wait in ``<record>.<split>.tail``."""

    model_config = ConfigDict(extra="forbid")

    shards: list[ShardEntry] = []
    documents: int = 0
    text_tokens: int = 0
    bos: int = 0
    eos: int = 0
    padding: int = 0
    tail_tokens: int = 0
    length_histogram: list[int] = []


class SegmentRecord(BaseModel):
    """One finished segment. ``last``: nothing of the input follows, and its end was verified."""

    model_config = ConfigDict(extra="forbid")

    item: int
    segment: int
    last: bool
    read: int = 0
    filtered: int = 0
    duplicates: int = 0
    quarantined: dict[str, int] = {}
    text_bytes: int = 0
    content: str = ""
    """Hash of what was read, as ``Reader.digest`` gives it; empty in records of versions that did not keep it."""
    notes: dict[str, int] = {}
    splits: dict[str, SplitOutput] = {}
    corrupt: str | None = None
    """Why the input was given up (on_corrupt_file: quarantine); its segments are then left out."""
