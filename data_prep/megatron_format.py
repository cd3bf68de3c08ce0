"""Megatron's ``.bin``/``.idx`` pair, read and written with numpy alone: existing corpora need no second
tokenization, and ours can feed tools that want it.

``.idx``: ``MMIDIDX\\0\\0``, uint64 version 1, uint8 type code, uint64 sequences, uint64 document bounds, int32
lengths, int64 byte offsets, int64 document bounds. ``.bin``: the ids, one sequence after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from calm_scale.config.data import PrepConfig, TokenizerConfig
from calm_scale.config.files import naming, new_file
from calm_scale.config.terminal import counted
from data_prep.errors import PrepMistakeError, ShardError, ShardMistakeError
from data_prep.journal import FolderLock
from data_prep.manifest import MANIFEST_NAME, Manifest, ShardEntry, SourceEntry, TokenCounts
from data_prep.megatron_counts import PairCounts, Tally, counts_of
from data_prep.packing import Packer, build_packer
from data_prep.reading import ShardDataset
from data_prep.shards import SUFFIX, ShardHeader, ShardWriter, token_dtype
from data_prep.tails import filler_id
from data_prep.tokenizer import Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document bounds
_TYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BATCH_TOKENS = 4 << 20
PADDING_UNKNOWN = "padding_counts_as_text"
"""The note in the manifest of a pair whose padding cannot be told from text."""


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
        raise ShardMistakeError(f"{error.filename}: {error.strerror}") from None
    dtype, lengths, bounds = _parse_index(raw, index_path)
    stated = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if size != stated:
        raise ShardError(f"{data_path} has {size} bytes, its index says {stated}: it is truncated or foreign")
    tokens = np.memmap(data_path, dtype, "r") if size else np.empty(0, dtype)
    return MegatronIndex(tokens, lengths, bounds)


def _beside(prefix: Path, suffix: str) -> Path:
    """``prefix`` with ``suffix`` after its name.

    Raises:
        ShardMistakeError: it has no name.
    """
    if prefix.name in ("", ".."):
        raise ShardMistakeError(f"PREFIX {prefix} is a folder; add the pair's name, without .bin or .idx")
    return prefix.with_name(prefix.name + suffix)


def _parse_index(raw: bytes, path: Path) -> tuple[np.dtype[np.integer], NDArray[np.int32], NDArray[np.int64]]:
    """Type of the ids, lengths and document bounds in the bytes of an ``.idx``; ``path`` is for the messages.

    Raises:
        ShardError: of another format, truncated, or of sequences or documents that cannot be.
    """
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ShardMistakeError(f"{path} is no Megatron index; name the pair without .bin or .idx")
    if len(raw) < _HEAD.size:
        raise ShardError(f"{path} is truncated: {len(raw)} bytes, its head has {_HEAD.size}; copy it again")
    _, version, code, num_sequences, num_bounds = _HEAD.unpack_from(raw)
    if version != 1 or code not in _TYPES:
        raise ShardMistakeError(
            f"{path} is no Megatron index of version 1 with integer ids (version {version}, type code {code})"
        )
    if len(raw) < (need := _HEAD.size + 12 * num_sequences + 8 * num_bounds):
        raise ShardError(f"{path} is truncated: {len(raw)} bytes, its head says {need}; copy it again")
    lengths = np.frombuffer(raw, "<i4", num_sequences, _HEAD.size)
    starts = np.frombuffer(raw, "<i8", num_sequences, _HEAD.size + 4 * num_sequences)
    bounds = np.frombuffer(raw, "<i8", num_bounds, _HEAD.size + 12 * num_sequences)
    dtype = np.dtype(_TYPES[code])
    if problem := _problem_of(lengths, starts, bounds, dtype.itemsize):
        raise ShardError(f"{path}: {problem}: the index is damaged or unfinished; write the pair again")
    return dtype, lengths, bounds


def _problem_of(
    lengths: NDArray[np.int32], starts: NDArray[np.int64], bounds: NDArray[np.int64], itemsize: int
) -> str:
    """What cannot be in an index, or nothing; ``starts`` is the first byte of every sequence."""
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
        ShardMistakeError: ``split_dir`` is no split, or no pair can be written at ``prefix``.
        ShardError: a shard is missing or damaged.
    """
    data = _writable(prefix, ".bin")
    _writable(prefix, ".idx")
    if prefix.is_dir():
        raise ShardMistakeError(f"PREFIX {prefix} is a folder; add a name for the pair: {prefix / 'NAME'}")
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
        ShardMistakeError: it would not be a regular file of its own, or would lie among the shards of a split.
    """
    path = _beside(prefix, suffix)
    for taken in (prefix, path):
        if taken.exists() and not taken.is_file() and not taken.is_dir():
            raise ShardMistakeError(
                f"PREFIX {prefix}: {taken} is a device or a pipe; name files that do not exist"
            )
    if (path.resolve().parent / MANIFEST_NAME).exists():
        raise ShardMistakeError(f"PREFIX {prefix} lies in a folder of shards; choose another folder")
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
        PrepMistakeError: the folder is in use or holds the split already, or the pair gives no whole sequence.
        ShardError: the pair is damaged, or an id does not fit the vocabulary.
    """
    index = open_megatron(prefix)
    offsets = index.document_offsets()
    largest = int(index.tokens.max()) if len(index.tokens) else 0
    if largest >= vocab_size or (len(index.tokens) and int(index.tokens.min()) < 0):
        raise ShardMistakeError(
            f"{prefix}.bin holds ids outside [0, {vocab_size}): largest {largest}; set vocab_size to fit"
        )
    counts = counts_of(prefix, index.tokens, index.lengths, offsets, tokenizer)
    packer = build_packer(prep.packing, prep.sequence_length, prep.alignment, tokenizer.pad_id)
    dtype = token_dtype(max(largest, tokenizer.max_id), prep.dtype)
    with FolderLock(data_dir):
        if (data_dir / split / MANIFEST_NAME).exists():
            raise PrepMistakeError(
                f"{data_dir / split} holds a finished split: remove it, or import to another folder"
            )
        path = data_dir / split / f"imported-000000{SUFFIX}"
        filled = split in prep.keep_tail
        header, tail, filler = _write_shard(
            path, dtype, index, offsets, packer, prep, vocab_size, filler_id(tokenizer) if filled else None
        )
        if header is None:
            raise PrepMistakeError(f"{prefix} holds less than one sequence of {prep.sequence_length} tokens")
        padding = (counts.padding or 0) + packer.padding + filler
        manifest = _manifest_of(counts, tokenizer, prep, vocab_size, split).model_copy(
            update={
                "dtype": dtype.name,
                "num_sequences": header.num_sequences,
                "max_id": header.max_id,
                "tokens": TokenCounts(
                    text=len(index.tokens) - counts.bos - counts.eos - (counts.padding or 0),
                    bos=counts.bos,
                    eos=counts.eos,
                    padding=padding,
                    tail=len(tail),
                    stored=header.num_tokens,
                ),
                "sources": [SourceEntry(name=str(prefix), weight=1.0, num_sequences=header.num_sequences)],
                "shards": [
                    ShardEntry(
                        name=path.name,
                        num_sequences=header.num_sequences,
                        checksum=f"{header.checksum:016x}",
                        max_id=header.max_id,
                        origin=prefix.name,
                        filler=filler,
                    )
                ],
                "provenance": {
                    "megatron": str(prefix),
                    "index": xxhash.xxh3_64_hexdigest(index.lengths.tobytes()),
                    "tokenizer": (stated or TokenizerConfig()).model_dump(
                        mode="json", exclude={"on_mismatch"}
                    ),
                },
            }
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


def _manifest_of(
    counts: PairCounts,
    tokenizer: Tokenizer,
    prep: PrepConfig,
    vocab_size: int,
    split: str,
) -> Manifest:
    return Manifest(
        split=split,
        dtype="",
        alignment=prep.alignment,
        sequence_length=prep.sequence_length,
        num_sequences=0,
        vocab_size=vocab_size,
        max_id=0,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        add_bos=tokenizer.add_bos,
        add_eos=tokenizer.add_eos,
        packing=prep.packing,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=tokenizer.name,
        documents=counts.document_counts,
        tokens=TokenCounts(),
        sources=[],
        shards=[],
        length_histogram=counts.length_histogram,
        notes={PADDING_UNKNOWN: 1} if counts.padding is None else {},
    )
