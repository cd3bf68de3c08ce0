"""What a Megatron pair cannot say of itself, kept beside it: documents, and which ids are padding.

``prefix.counts.json`` is written with a pair that is exported, and believed for that very pair only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from calm_scale.config.files import checked, read_object, write_atomically
from data_prep.errors import ShardMistakeError
from data_prep.manifest import DocumentCounts, Manifest
from data_prep.tokenizer import Tokenizer

_REMEDY = "remove it: the pair can be read without, but then padding counts as text"


class PairCounts(BaseModel):
    """``documents`` of the split, and the pair's ``bos``, ``eos`` and ``padding`` ids; the other ids are text.

    ``length_histogram`` is the manifest's. ``tokens`` and ``lengths`` are xxh3-64 of the pair's ids and sequence
    lengths; ``padding`` is None where it cannot be told from text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    empty: int = 0
    bos: int
    eos: int
    padding: int | None
    length_histogram: list[int]
    tokens: str = ""
    lengths: str = ""

    @property
    def document_counts(self) -> DocumentCounts:
        """For the manifest of the split that is made of the pair."""
        quarantined = {"empty": self.empty} if self.empty else {}
        return DocumentCounts(read=self.documents + self.empty, kept=self.documents, quarantined=quarantined)


@dataclass
class Tally:
    """Counts the ids of a split while they are written to a pair."""

    manifest: Manifest
    num_bos: int = 0
    num_eos: int = 0
    num_pad: int = 0

    def __post_init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, ids: NDArray[np.integer], stored: bytes) -> None:
        """One sequence, and its bytes in the pair."""
        self._hash.update(stored)
        self.num_bos += int((ids == self.manifest.bos_id).sum()) if self.manifest.add_bos else 0
        self.num_eos += int((ids == self.manifest.eos_id).sum()) if self.manifest.add_eos else 0
        self.num_pad += int((ids == self.manifest.pad_id).sum()) if self.manifest.served_padding else 0

    def write(self, prefix: Path, lengths: NDArray[np.int32]) -> None:
        """Write the sidecar, or none where the counts would be a guess.

        A split that left a tail out has counts of more than the pair holds; the ids then tell how many are in it, if
        padding has an id of its own.
        """
        path = counts_path(prefix)
        manifest, counts = self.manifest, self.manifest.tokens
        bos, eos, padding = counts.bos + counts.boundaries, counts.eos, manifest.served_padding
        if counts.tail:
            if padding and manifest.pad_id in (manifest.bos_id, manifest.eos_id):
                path.unlink(missing_ok=True)
                return
            bos, eos, padding = self.num_bos, self.num_eos, self.num_pad
        found = PairCounts(
            documents=manifest.documents.kept,
            bos=bos,
            eos=eos,
            padding=padding,
            length_histogram=manifest.length_histogram,
            tokens=self._hash.hexdigest(),
            lengths=_digest(lengths.astype("<i4")),
        )
        write_atomically(path, json.dumps(found.model_dump(), indent=1) + "\n")


def counts_path(prefix: Path) -> Path:
    """The sidecar's place."""
    return prefix.with_name(prefix.name + ".counts.json")


def counts_of(
    prefix: Path,
    ids: NDArray[np.integer],
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    tokenizer: Tokenizer,
) -> PairCounts:
    """The sidecar's counts where there is one of this pair, else what its documents show.

    Args:
        ids, lengths: the pair's. offsets: first id of each document, and the end.

    Raises:
        ShardMistakeError: a sidecar that is damaged.
    """
    path = counts_path(prefix)
    if path.exists():
        raw = read_object(path, remedy=_REMEDY, raises=ShardMistakeError)
        stated = checked(PairCounts, raw, path, remedy=_REMEDY, raises=ShardMistakeError)
        if (stated.tokens, stated.lengths) == (_digest(ids), _digest(lengths)):
            return stated
    sizes = np.diff(offsets)
    real = sizes > 0
    first, last = ids[offsets[:-1][real]], ids[offsets[1:][real] - 1]
    return PairCounts(
        documents=int(real.sum()),
        empty=int((~real).sum()),
        bos=int((first == tokenizer.bos_id).sum()) if tokenizer.bos_id is not None else 0,
        eos=int((last == tokenizer.eos_id).sum()) if tokenizer.eos_id is not None else 0,
        padding=None,
        length_histogram=np.trim_zeros(np.bincount(np.frexp(sizes[real])[1] - 1, minlength=1), "b").tolist(),
    )


def _digest(array: NDArray[np.integer]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).data)
