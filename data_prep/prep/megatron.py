"""Megatron's ``.bin``/``.idx`` pair, read and written with numpy alone: existing corpora need no second
tokenization, and ours can feed tools that want it.

``.idx``: ``MMIDIDX\\0\\0``, uint64 version 1, uint8 type code, uint64 sequences, uint64 document bounds, int32
lengths, int64 byte offsets, int64 document bounds. ``.bin``: the ids, one sequence after the other.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from calm_scale.config.data import PrepConfig, TokenizerConfig
from calm_scale.config.files import checked, naming, new_file, read_object, write_atomically
from calm_scale.config.quantities import counted
from data_prep.errors import PrepError, ShardError
from data_prep.prep.packing import Packer, build_packer, filler_id
from data_prep.shards import SUFFIX, ShardHeader, ShardWriter, token_dtype
from data_prep.shards.manifest import (
    MANIFEST_NAME,
    DocumentCounts,
    FolderLock,
    Manifest,
    SourceEntry,
    TokenCounts,
    describe_shard,
)
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer import Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document bounds
_TYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BATCH_TOKENS = 4 << 20
PADDING_UNKNOWN = "padding_counts_as_text"
"""The note in the manifest of a pair whose padding cannot be told from text."""
_REMEDY = "remove it: the pair can be read without, but then padding counts as text"


@dataclass(frozen=True)
class MegatronIndex:
    """An opened pair. ``lengths`` int32 [sequences], ``bounds`` int64 [documents + 1] (in sequences)."""

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    bounds: NDArray[np.int64]

    def document_offsets(self) -> NDArray[np.int64]:
        """First token of each document, and the end: int64 [documents + 1]."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return np.asarray(ends[self.bounds], np.int64)


def open_megatron(prefix: Path) -> MegatronIndex:
    """Open ``prefix.bin`` and ``prefix.idx``.

    Raises:
        ShardError: one is missing, of another format, the .bin is shorter or longer than the index says, or the
            index says what cannot be.
    """
    index_path, data_path = _beside(prefix, ".idx"), _beside(prefix, ".bin")
    try:
        raw = index_path.read_bytes()
        size = data_path.stat().st_size
    except OSError as error:
        raise ShardError(f"{error.filename}: {error.strerror}", mistake=True) from None
    dtype, lengths, bounds = _parse_index(raw, index_path)
    stated = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if size != stated:
        raise ShardError(f"{data_path} has {size} bytes, its index says {stated}: it is truncated or foreign")
    tokens = np.memmap(data_path, dtype, "r") if size else np.empty(0, dtype)
    return MegatronIndex(tokens, lengths, bounds)


def _beside(prefix: Path, suffix: str) -> Path:
    """``prefix`` with ``suffix`` after its name.

    Raises:
        ShardError: it has no name.
    """
    if prefix.name in ("", ".."):
        raise ShardError(
            f"PREFIX {prefix} is a folder; add the pair's name, without .bin or .idx", mistake=True
        )
    return prefix.with_name(prefix.name + suffix)


def _parse_index(raw: bytes, path: Path) -> tuple[np.dtype[np.integer], NDArray[np.int32], NDArray[np.int64]]:
    """Type of the ids, lengths and document bounds in the bytes of an ``.idx``; ``path`` is for the messages.

    Raises:
        ShardError: of another format, truncated, or of sequences or documents that cannot be.
    """
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ShardError(f"{path} is no Megatron index; name the pair without .bin or .idx", mistake=True)
    if len(raw) < _HEAD.size:
        raise ShardError(f"{path} is truncated: {len(raw)} bytes, its head has {_HEAD.size}; copy it again")
    _, version, code, num_sequences, num_bounds = _HEAD.unpack_from(raw)
    if version != 1 or code not in _TYPES:
        raise ShardError(
            f"{path} is no Megatron index of version 1 with integer ids (version {version}, type code {code})",
            mistake=True,
        )
    if len(raw) < (need := _HEAD.size + 12 * num_sequences + 8 * num_bounds):
        raise ShardError(f"{path} is truncated: {len(raw)} bytes, its head says {need}; copy it again")
    lengths = np.frombuffer(raw, "<i4", num_sequences, _HEAD.size)
    starts = np.frombuffer(raw, "<i8", num_sequences, _HEAD.size + 4 * num_sequences)
    bounds = np.frombuffer(raw, "<i8", num_bounds, _HEAD.size + 12 * num_sequences)
    dtype = np.dtype(_TYPES[code])
    if problem := _find_inconsistency(lengths, starts, bounds, dtype.itemsize):
        raise ShardError(f"{path}: {problem}: the index is damaged or unfinished; write the pair again")
    return dtype, lengths, bounds


def _find_inconsistency(
    lengths: NDArray[np.int32], starts: NDArray[np.int64], bounds: NDArray[np.int64], itemsize: int
) -> str:
    """The first inconsistency of an index, or an empty string; ``starts`` is the first byte of every sequence."""
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        return f"sequence {at} has a length of {lengths[at]}"
    wrong = starts != (np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize
    if wrong.any():
        return f"sequence {int(wrong.argmax())} does not begin where the one before it ends"
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(lengths):
        found = f"{bounds[0]} to {bounds[-1]}" if len(bounds) else "none"
        return (
            f"its document bounds must go from 0 to its {counted(len(lengths), 'sequence')} and are {found}"
        )
    if (np.diff(bounds) < 0).any():
        at = int((np.diff(bounds) < 0).argmax())
        return f"document {at} begins at sequence {bounds[at]} and ends before, at {bounds[at + 1]}"
    return ""


def write_megatron(
    prefix: Path, dtype: np.dtype[np.integer], lengths: NDArray[np.int32], bounds: NDArray[np.int64]
) -> None:
    """Write ``prefix.idx`` for a ``prefix.bin`` of ids of ``dtype``."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * dtype.itemsize
    head = _HEAD.pack(_MAGIC, 1, code, len(lengths), len(bounds))
    with new_file(_writable(prefix, ".idx")) as file:
        for piece in (head, lengths.astype("<i4"), offsets.astype("<i8"), bounds.astype("<i8")):
            file.write(piece if isinstance(piece, bytes) else piece.tobytes())


def export_megatron(split_dir: Path, prefix: Path) -> int:
    """Write a split as ``prefix.bin`` / ``prefix.idx``, one document per stored sequence; their number.

    A last sequence that was filled up is written without its filler. Beside the pair goes what it cannot say of itself
    (``megatron_counts``).

    Raises:
        ShardError: ``split_dir`` is no split, or no pair can be written at ``prefix``.
        ShardError: a shard is missing or damaged.
    """
    data = _writable(prefix, ".bin")
    _writable(prefix, ".idx")
    if prefix.is_dir():
        raise ShardError(
            f"PREFIX {prefix} is a folder; add a name for the pair: {prefix / 'NAME'}", mistake=True
        )
    manifest = Manifest.read(split_dir)
    dataset = ShardDataset(split_dir, manifest.sequence_length, partial=True)
    dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<i4")
    data.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.empty(len(dataset), np.int32)
    tally = Tally(manifest)
    with new_file(data) as file:
        for i in range(len(dataset)):
            sample = dataset[i]
            lengths[i] = len(sample)
            stored = np.ascontiguousarray(sample, dtype).tobytes()
            file.write(stored)
            tally.add(sample, stored)
        file.flush()  # a full disk ends here, before the files that belong to this one
        write_megatron(prefix, dtype, lengths, np.arange(len(dataset) + 1, dtype=np.int64))
        tally.write(prefix, lengths)
    return len(dataset)


def _writable(prefix: Path, suffix: str) -> Path:
    """The file of a pair to write: what a link points to, so that the link stays.

    Raises:
        ShardError: it would not be a regular file of its own, or would lie among the shards of a split.
    """
    path = _beside(prefix, suffix)
    for taken in (prefix, path):
        if taken.exists() and not taken.is_file() and not taken.is_dir():
            raise ShardError(
                f"PREFIX {prefix}: {taken} is a device or a pipe; name files that do not exist", mistake=True
            )
    if (path.resolve().parent / MANIFEST_NAME).exists():
        raise ShardError(f"PREFIX {prefix} is inside a folder of shards; choose another folder", mistake=True)
    return path.resolve() if path.is_symlink() else path


def import_megatron(
    prefix: Path,
    data_dir: Path,
    tokenizer: Tokenizer,
    prep: PrepConfig,
    *,
    vocab_size: int,
    split: str = "train",
    stated: TokenizerConfig | None = None,
) -> Manifest:
    """Repack a Megatron pair into ``data_dir/split`` without tokenizing: documents keep their ids.

    Where the pair's counts are not beside it, padding in it counts as text, and the manifest's notes say
    ``PADDING_UNKNOWN``.

    BOS and EOS are counted where the documents carry them already; ``tokenizer`` says which ids they are, and
    ``stated`` is what the manifest says of it.

    Raises:
        PrepError: the folder is in use or holds the split already, or the pair gives no whole sequence.
        ShardError: the pair is damaged, or an id does not fit the vocabulary.
    """
    index = open_megatron(prefix)
    offsets = index.document_offsets()
    largest = int(index.tokens.max()) if len(index.tokens) else 0
    if largest >= vocab_size or (len(index.tokens) and int(index.tokens.min()) < 0):
        raise ShardError(
            f"{prefix}.bin holds ids outside [0, {vocab_size}): largest {largest}; set vocab_size to fit",
            mistake=True,
        )
    counts = counts_of(prefix, index.tokens, index.lengths, offsets, tokenizer)
    packer = build_packer(prep.packing, prep.sequence_length, prep.alignment, tokenizer.pad_id)
    dtype = token_dtype(max(largest, tokenizer.max_id), prep.dtype)
    with FolderLock(data_dir):
        if (data_dir / split / MANIFEST_NAME).exists():
            raise PrepError(
                f"{data_dir / split} holds a finished split: remove it, or import to another folder",
                mistake=True,
            )
        path = data_dir / split / f"imported-000000{SUFFIX}"
        filled = split in prep.keep_tail
        header, tail, filler = _write_shard(
            path, dtype, index, offsets, packer, prep, vocab_size, filler_id(tokenizer) if filled else None
        )
        if header is None:
            raise PrepError(
                f"{prefix} holds less than one sequence of {prep.sequence_length} tokens", mistake=True
            )
        manifest = Manifest(
            split=split,
            dtype=dtype.name,
            alignment=prep.alignment,
            sequence_length=prep.sequence_length,
            num_sequences=header.num_sequences,
            vocab_size=vocab_size,
            max_id=header.max_id,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            add_bos=tokenizer.add_bos,
            add_eos=tokenizer.add_eos,
            packing=prep.packing,
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer=tokenizer.name,
            documents=counts.document_counts,
            tokens=TokenCounts(
                text=len(index.tokens) - counts.bos - counts.eos - (counts.padding or 0),
                bos=counts.bos,
                eos=counts.eos,
                padding=(counts.padding or 0) + packer.padding + filler,
                tail=len(tail),
                stored=header.num_tokens,
            ),
            sources=[SourceEntry(name=str(prefix), weight=1.0, num_sequences=header.num_sequences)],
            shards=[describe_shard(path, header, origin=prefix.name, filler=filler)],
            length_histogram=counts.length_histogram,
            notes={PADDING_UNKNOWN: 1} if counts.padding is None else {},
            provenance={
                "megatron": str(prefix),
                "index": xxhash.xxh3_64_hexdigest(index.lengths.tobytes()),
                "tokenizer": (stated or TokenizerConfig()).model_dump(mode="json", exclude={"on_mismatch"}),
            },
        )
        manifest.write(data_dir / split)
    return manifest


def _write_shard(
    path: Path,
    dtype: np.dtype[np.unsignedinteger],
    index: MegatronIndex,
    offsets: NDArray[np.int64],
    packer: Packer,
    prep: PrepConfig,
    vocab_size: int,
    filler: int | None,
) -> tuple[ShardHeader | None, NDArray[np.unsignedinteger], int]:
    """Pack all documents of a pair into one shard; after a failure there is nothing of it.

    Args:
        filler: the id that fills up a last sequence; None leaves that out.

    Returns:
        The shard's header (None: there was no whole sequence), the ids left out, and how many fill it up.
    """
    try:
        with naming(path):
            writer = ShardWriter(
                path,
                dtype,
                alignment=prep.alignment,
                sequence_length=prep.sequence_length,
                max_id=vocab_size - 1,
            )
            start = 0
            while start < len(offsets) - 1:
                stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _BATCH_TOKENS)) - 1)
                ids = np.asarray(index.tokens[offsets[start] : offsets[stop]], np.uint32)
                writer.append(packer.add(ids, offsets[start : stop + 1] - offsets[start]))
                start = stop
            writer.append(packer.finish())
            missing = -int(offsets[-1] + packer.padding) % prep.sequence_length if filler is not None else 0
            writer.append(np.full(missing, filler or 0, dtype))
            return *writer.close(), missing
    except BaseException:
        path.with_name(path.name + ".part").unlink(missing_ok=True)
        raise


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
        ShardError: a sidecar that is damaged.
    """
    path = counts_path(prefix)
    if path.exists():
        raw = read_object(path, remedy=_REMEDY, raises=partial(ShardError, mistake=True))
        stated = checked(PairCounts, raw, path, remedy=_REMEDY, raises=partial(ShardError, mistake=True))
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
