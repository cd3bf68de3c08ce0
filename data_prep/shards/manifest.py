"""What stands beside the shards of one split: everything a reader must know, and the arithmetic of the run.

A manifest is the only "done": it is written last, in one rename, and a folder without it was not finished.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict

from calm_scale.config.exclusive import OccupiedError, exclusive
from calm_scale.config.files import checked, read_object, write_atomically
from data_prep.errors import PrepError, ShardError
from data_prep.shards import ShardHeader

_LOCK_FILE = ".prep.lock"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class FolderLock:
    """One prep per data folder, on whatever machine; what a killed one leaves is taken over.

    Raises:
        PrepError: the folder cannot be made.
    """

    def __init__(self, data_dir: Path) -> None:
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise PrepError(
                f"{data_dir}: cannot be made ({error.strerror}); set `data`", mistake=True
            ) from None
        self._path = data_dir / _LOCK_FILE
        self._held = ExitStack()

    def __enter__(self) -> FolderLock:
        """Take the lock.

        Raises:
            PrepError: another command holds it; says which.
        """
        try:
            self._held.enter_context(exclusive(self._path))
        except OccupiedError as error:
            raise PrepError(
                f"another command is writing {self._path.parent} ({error.holder}); wait for it, or end it first",
                mistake=True,
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


def check_lock(data_dir: Path) -> None:
    """Refuse a folder as ``FolderLock`` would, without making anything.

    Raises:
        PrepError: the folder cannot be made, or another command is writing it.
    """
    place = data_dir
    while not place.exists():
        place = place.parent
    why = errno.ENOTDIR if not place.is_dir() else 0 if os.access(place, os.W_OK) else errno.EACCES
    if why:
        raise PrepError(f"{data_dir}: cannot be made ({os.strerror(why)}); set `data`", mistake=True)
    if (data_dir / _LOCK_FILE).exists():
        with FolderLock(data_dir):
            return


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardEntry(_Record):
    """One shard: its counts, its checksum (xxh64 of the token bytes, 16 hex digits), where its text came from.

    ``source`` is the index of the entry of ``prep.sources``. ``compressed`` marks the zstd form. The last
    ``filler`` ids of the shard are no text: they fill up its last sequence, whatever id they are.
    """

    name: str
    num_sequences: int
    checksum: str
    max_id: int
    source: int = 0
    origin: str = ""
    compressed: bool = False
    filler: int = 0


def describe_shard(
    path: Path, header: ShardHeader, *, source: int = 0, origin: str = "", filler: int = 0
) -> ShardEntry:
    """The manifest's entry of the shard at ``path``."""
    return ShardEntry(
        name=path.name,
        num_sequences=header.num_sequences,
        checksum=f"{header.checksum:016x}",
        max_id=header.max_id,
        source=source,
        origin=origin,
        filler=filler,
    )


class SourceEntry(_Record):
    """One source of the mixture and what it gave to this split."""

    name: str
    weight: float
    num_sequences: int


class DocumentCounts(_Record):
    """read = kept + other_splits + filtered + duplicates + Σ quarantined."""

    read: int = 0
    kept: int = 0
    other_splits: int = 0
    filtered: int = 0
    duplicates: int = 0
    quarantined: dict[str, int] = {}

    def closes(self) -> bool:
        """Whether every document read is accounted for."""
        parts = self.kept + self.other_splits + self.filtered + self.duplicates
        return self.read == parts + sum(self.quarantined.values())


class TokenCounts(_Record):
    """text + bos + eos + boundaries + padding = stored + tail; tail is the last, incomplete sequence where it is not
    stored.

    ``padding`` counts what aligns documents and what fills up a stored last sequence. ``boundaries`` counts the BOS
    ids before the rest of a document that follows another document where the ends of segments are joined.
    """

    text: int = 0
    bos: int = 0
    eos: int = 0
    boundaries: int = 0
    padding: int = 0
    tail: int = 0
    stored: int = 0

    def closes(self) -> bool:
        """Whether every token is accounted for."""
        parts = self.text + self.bos + self.eos + self.boundaries + self.padding
        return parts == self.stored + self.tail


class Manifest(_Record):
    """One split. ``fingerprint`` identifies its contents (ids, lengths, order, tokenizer), not its place."""

    format_version: int = FORMAT_VERSION
    complete: bool = True
    split: str
    dtype: str
    alignment: int
    sequence_length: int
    num_sequences: int
    vocab_size: int
    max_id: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    packing: str
    tokenizer_fingerprint: str
    tokenizer: str
    documents: DocumentCounts
    tokens: TokenCounts
    sources: list[SourceEntry]
    shards: list[ShardEntry]
    length_histogram: list[int] = []
    """Documents whose token count lies in [2^i, 2^(i+1))."""
    notes: dict[str, int] = {}
    provenance: dict[str, Any] = {}

    @property
    def filler(self) -> int:
        """Ids that fill up last sequences; they stand at the ends of shards, and no reader serves them."""
        return sum(s.filler for s in self.shards)

    @property
    def served_padding(self) -> int:
        """Padding ids that readers meet: those that align documents, not the filler."""
        return self.tokens.padding - self.filler

    @property
    def fingerprint(self) -> str:
        """Hex digest of what a reader sees: the ids of every sequence in order, and what they mean."""
        seen: list[object] = [
            self.format_version,
            self.sequence_length,
            self.tokenizer_fingerprint,
            self.bos_id,
            self.eos_id,
            self.pad_id,
            [(s.num_sequences, s.checksum) for s in self.shards],
        ]
        if self.filler:
            seen.append([s.filler for s in self.shards])
        weights = [s.weight for s in self.sources if s.num_sequences]
        if len(set(weights)) > 1:  # they decide the order of training
            seen.append(weights)
        return xxhash.xxh3_128_hexdigest(json.dumps(seen, separators=(",", ":")).encode())

    def write(self, split_dir: Path) -> None:
        """Write ``manifest.json`` in one atomic step."""
        text = json.dumps({**self.model_dump(mode="json"), "fingerprint": self.fingerprint}, indent=1)
        write_atomically(split_dir / MANIFEST_NAME, text + "\n")

    @classmethod
    def read(cls, split_dir: Path) -> Manifest:
        """Read and check the manifest of a split folder.

        Raises:
            ShardError: missing (prep did not finish), of another version, incomplete, or changed by hand.
        """
        path = split_dir / MANIFEST_NAME
        if not path.exists():
            raise ShardError(
                f"{path} is missing: data prep has not finished (or never ran) for this split; "
                "run `calm-scale prep` until it reports success",
                mistake=True,
            )
        remedy = "prepare the split again with `calm-scale prep --restart`"
        raw = read_object(path, remedy=remedy, raises=ShardError)
        if (found := raw.get("format_version")) != FORMAT_VERSION:
            raise ShardError(f"{path} has format version {found}; this build reads {FORMAT_VERSION}")
        stated = raw.pop("fingerprint", None)
        manifest = checked(cls, raw, path, remedy=remedy, raises=ShardError)
        if not manifest.complete or not (manifest.documents.closes() and manifest.tokens.closes()):
            raise ShardError(f"{path} is not complete, or its counts do not add up; rerun `calm-scale prep`")
        if stated != manifest.fingerprint:
            raise ShardError(f"{path} was changed after it was written (its fingerprint does not fit)")
        return manifest
