"""``prep verify``: everything a prepared split says about itself, checked against its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from pydantic import ValidationError
from rich.console import Console

from calm_scale.config.terminal import counted
from data_prep.cold import open_cold
from data_prep.errors import ShardError, ShardMistakeError
from data_prep.manifest import MANIFEST_NAME, DocumentCounts, Manifest, ShardEntry, TokenCounts
from data_prep.report import REPORT_NAME, PrepReport, summarise
from data_prep.shards import ShardHeader, map_tokens, read_header

_ROWS_AT_ONCE = 1 << 22


@dataclass
class Verification:
    """What was checked, and every problem found."""

    directory: Path
    num_shards: int = 0
    num_tokens: int = 0
    fingerprint: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_split(
    split_dir: Path, on_shard: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Check the manifest's arithmetic, and of every shard the header, the checksum, the largest id and K.

    ``on_shard(done, total)`` is told of progress. Problems are collected, not raised.
    """
    found = Verification(split_dir)
    try:
        manifest = Manifest.read(split_dir)
    except ShardError as error:
        found.problems.append(str(error))
        return found
    found.fingerprint = manifest.fingerprint
    for done, entry in enumerate(manifest.shards, 1):
        found.problems += shard_problems(split_dir, manifest, entry)
        found.num_shards += 1
        found.num_tokens += entry.num_sequences * manifest.sequence_length
        on_shard(done, len(manifest.shards))
    found.problems += _manifest_problems(manifest)
    return found


def verify_tree(directory: Path) -> list[Verification]:
    """Verify a split's folder, or every split of a data or run folder.

    Raises:
        ShardMistakeError: there is no split in it.
    """
    if (directory / "data" / MANIFEST_NAME).exists():
        directory = directory / "data"
    report = PrepReport.read(directory)
    stated = {directory / split.name: split.fingerprint for split in report.splits} if report else {}
    splits = sorted({*stated, *(path.parent for path in directory.glob(f"*/{MANIFEST_NAME}"))})
    if not splits and not (directory / MANIFEST_NAME).exists():
        raise ShardMistakeError(
            f"{directory} holds no prepared split (no {MANIFEST_NAME}); run `calm-scale prep` first"
        )
    found = [verify_split(split) for split in splits or [directory]]
    if splits and (directory / MANIFEST_NAME).exists() and (wrong := _report_problems(directory, report)):
        found.append(Verification(directory, problems=wrong))
    for one in found:
        if one.fingerprint and stated.get(one.directory, one.fingerprint) != one.fingerprint:
            one.problems.append(f"{one.directory}: is not the split that {directory / MANIFEST_NAME} names")
    return found


def _report_problems(directory: Path, report: PrepReport | None) -> list[str]:
    """What is wrong with the manifest of a whole prep, beside the splits' own.

    A split that is missing, damaged or another one is told of elsewhere.
    """
    path = directory / REPORT_NAME
    if report is None:
        return [
            f"{path} is damaged, not the manifest of a prep; copy it again, or prepare again with --restart"
        ]
    try:
        manifests = [Manifest.read(directory / split.name) for split in report.splits]
    except ShardError:
        return []
    problems = [
        f"{path}: its numbers of split {split.name} are not those of {directory / split.name / MANIFEST_NAME}"
        for split, manifest in zip(report.splits, manifests, strict=True)
        if split.fingerprint == manifest.fingerprint and split != summarise(manifest)
    ]
    sums = {kind: sum(getattr(m.tokens, kind) for m in manifests) for kind in TokenCounts.model_fields}
    if {**dict.fromkeys(sums, 0), **report.tokens} != sums:
        problems.append(f"{path}: its tokens are not the sum over its splits")
    try:
        closes = DocumentCounts.model_validate(report.documents).closes()
    except ValidationError:
        closes = False
    if not closes:
        problems.append(f"{path}: its documents do not add up")
    return problems


def _manifest_problems(manifest: Manifest) -> list[str]:
    problems = []
    stored = sum(s.num_sequences for s in manifest.shards)
    if stored != manifest.num_sequences or stored * manifest.sequence_length != manifest.tokens.stored:
        problems.append(f"manifest: its shards hold {stored} sequences, it says {manifest.num_sequences}")
    if manifest.sequence_length % manifest.alignment:
        problems.append(
            f"manifest: sequence_length {manifest.sequence_length} is not a multiple of K-alignment"
        )
    if (
        manifest.max_id != max((s.max_id for s in manifest.shards), default=0)
        or manifest.max_id >= manifest.vocab_size
    ):
        problems.append(
            f"manifest: max_id {manifest.max_id} does not fit its shards or vocab_size {manifest.vocab_size}"
        )
    if manifest.filler > manifest.tokens.padding or any(
        not 0 <= s.filler < manifest.sequence_length or (s.filler and not s.num_sequences)
        for s in manifest.shards
    ):
        problems.append("manifest: what fills up last sequences does not fit them, or the padding counted")
    for source, entry in enumerate(manifest.sources):
        given = sum(s.num_sequences for s in manifest.shards if s.source == source)
        if given != entry.num_sequences:
            problems.append(
                f"manifest: source {source} gave {given} sequences, it says {entry.num_sequences}"
            )
    return problems


def shard_problems(split_dir: Path, manifest: Manifest, entry: ShardEntry) -> list[str]:
    """What is wrong with one shard: reads all of it, in pieces."""
    try:
        return _problems_inside(split_dir, manifest, entry)
    except (ShardError, OSError) as error:
        return [str(error)]


def _problems_inside(split_dir: Path, manifest: Manifest, entry: ShardEntry) -> list[str]:
    path = split_dir / entry.name
    if entry.compressed:
        header, pieces = open_cold(path)
    else:
        header = read_header(path)
        flat = map_tokens(path, header).reshape(-1)
        pieces = (np.asarray(flat[i : i + _ROWS_AT_ONCE]) for i in range(0, len(flat), _ROWS_AT_ONCE))
    problems = _header_problems(manifest, entry, header)
    digest = xxhash.xxh64()
    largest = count = 0
    for piece in pieces:
        digest.update(piece.view(np.uint8).data)
        largest = max(largest, int(piece.max()))
        count += len(piece)
    if digest.intdigest() != header.checksum:
        problems.append(
            f"{path}: its tokens do not fit their checksum: the file is damaged, prepare again with --restart"
        )
    if largest != header.max_id or count != header.num_tokens:
        problems.append(
            f"{path}: largest id {largest} of {count} ids, the header says {header.max_id} of {header.num_tokens}"
        )
    return problems


def _header_problems(manifest: Manifest, entry: ShardEntry, header: ShardHeader) -> list[str]:
    stated = {
        "dtype": (header.dtype.name, manifest.dtype),
        "alignment": (header.alignment, manifest.alignment),
        "sequence_length": (header.sequence_length, manifest.sequence_length),
        "num_sequences": (header.num_sequences, entry.num_sequences),
        "checksum": (f"{header.checksum:016x}", entry.checksum),
        "max_id": (header.max_id, entry.max_id),
    }
    return [f"{entry.name}: {k} is {a}, the manifest says {b}" for k, (a, b) in stated.items() if a != b]


def show_verification(directory: Path, console: Console | None = None) -> bool:
    """Verify, print one line per split and every problem; whether all is well.

    Raises:
        ShardError: there is no split in ``directory``.
    """
    console = console or Console(highlight=False, emoji=False)
    found = verify_tree(directory)
    for split in found:
        state = "ok" if split.ok else counted(len(split.problems), "problem")
        console.print(
            f"{split.directory}: {state} · {counted(split.num_shards, 'shard')}, {split.num_tokens:,} tokens",
            markup=False,
        )
        for problem in split.problems:
            console.print(f"  {problem}", markup=False)
    return all(split.ok for split in found)
