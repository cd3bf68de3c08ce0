"""The report of a finished prep, the check of everything that it wrote, and a look at single sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.files import (
    checked,
    new_file,
    write_atomically,
)
from data_prep.errors import ShardError, TokenizerError
from data_prep.prep.journal import SourceCounts
from data_prep.shards.manifest import (
    MANIFEST_NAME,
    DocumentCounts,
    Manifest,
    ShardEntry,
    TokenCounts,
)
from data_prep.shards.reading import ShardDataset, find_shard_problems
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.tokenizer.definition import find_definition

REPORT_NAME = "manifest.json"
QUARANTINE_NAME = "quarantine.jsonl"
_OF_THIS_RUN = {
    "data_dir",
    "quarantine",
    "seconds",
    "steady_seconds",
    "steady_bytes",
    "steady_cpu_seconds",
    "peak_megabytes",
    "workers",
    "encoder",
    "already_done",
}


class SplitSummary(BaseModel):
    """One split in numbers."""

    name: str
    fingerprint: str
    documents: int
    num_sequences: int
    tokens: int
    padding: int
    tail: int


class PrepReport(BaseModel):
    """The run as a whole; written as ``data/manifest.json``, the last file of a prep.

    What depends on how it was run (time, workers, encoder) is not written there: the folder's bytes are those of
    any other run of the same plan.
    """

    complete: bool = True
    plan: str
    documents: dict[str, Any]
    tokens: dict[str, int]
    splits: list[SplitSummary]
    text_bytes: int
    contents: list[str] = []
    """A hash of what was read from each input of the plan, by which an input with another time is recognised."""
    tokenizer_fingerprint: str
    corrupt_inputs: dict[str, str] = {}
    sources: list[SourceCounts] = []
    unusable_inputs: dict[str, str] = {}
    """Sources and inputs without a usable record, and why."""
    notes: dict[str, int] = {}
    data_dir: Path = Path()
    quarantine: Path | None = None
    seconds: float = 0.0
    steady_seconds: float = 0.0
    """From the first block to the last, without start-up; ``steady_bytes`` of text were read in it."""
    steady_bytes: int = 0
    steady_cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0
    workers: int = 1
    encoder: str = ""
    already_done: bool = False

    def write(self) -> None:
        """Write ``data/manifest.json`` in one atomic step."""
        write_atomically(
            self.data_dir / REPORT_NAME, self.model_dump_json(indent=1, exclude=_OF_THIS_RUN) + "\n"
        )

    @classmethod
    def read(cls, data_dir: Path) -> PrepReport | None:
        """The report of a finished prep, or ``None``."""
        try:
            raw = json.loads((data_dir / REPORT_NAME).read_text(encoding="utf-8"))
            quarantine = data_dir / QUARANTINE_NAME
            return cls.model_validate(
                {**raw, "data_dir": data_dir, "quarantine": quarantine if quarantine.exists() else None}
            )
        except (OSError, ValueError):
            return None


def summarise(manifest: Manifest) -> SplitSummary:
    """One split's line of the report."""
    return SplitSummary(
        name=manifest.split,
        fingerprint=manifest.fingerprint,
        documents=manifest.documents.kept,
        num_sequences=manifest.num_sequences,
        tokens=manifest.tokens.stored,
        padding=manifest.tokens.padding,
        tail=manifest.tokens.tail,
    )


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


def verify_split(split_dir: Path) -> Verification:
    """Check the manifest's arithmetic, and of every shard the header, the checksum, the largest id and K.

    Problems are collected, not raised.
    """
    found = Verification(split_dir)
    try:
        manifest = Manifest.read(split_dir)
    except ShardError as error:
        found.problems.append(str(error))
        return found
    found.fingerprint = manifest.fingerprint
    for entry in manifest.shards:
        found.problems += find_shard_problems(split_dir, manifest, entry)
        found.num_shards += 1
        found.num_tokens += entry.num_sequences * manifest.sequence_length
    found.problems += _check_manifest(manifest)
    return found


def verify_tree(directory: Path) -> list[Verification]:
    """Verify a split's folder, or every split of a data or run folder.

    Raises:
        ShardError: there is no split in it.
    """
    if (directory / "data" / MANIFEST_NAME).exists():
        directory = directory / "data"
    report = PrepReport.read(directory)
    stated = {directory / split.name: split.fingerprint for split in report.splits} if report else {}
    splits = sorted({*stated, *(path.parent for path in directory.glob(f"*/{MANIFEST_NAME}"))})
    if not splits and not (directory / MANIFEST_NAME).exists():
        raise ShardError(
            f"{directory} holds no prepared split (no {MANIFEST_NAME}); run `calm-scale prep` first",
            mistake=True,
        )
    found = [verify_split(split) for split in splits or [directory]]
    if splits and (directory / MANIFEST_NAME).exists() and (wrong := _check_report(directory, report)):
        found.append(Verification(directory, problems=wrong))
    for one in found:
        if one.fingerprint and stated.get(one.directory, one.fingerprint) != one.fingerprint:
            one.problems.append(f"{one.directory}: is not the split that {directory / MANIFEST_NAME} names")
    return found


def _check_report(directory: Path, report: PrepReport | None) -> list[str]:
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


def _check_manifest(manifest: Manifest) -> list[str]:
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


@dataclass(frozen=True)
class StoredSequence:
    """One stored sequence: its ids (without what fills it up), where they came from, and their text where a
    tokenizer was given."""

    index: int
    ids: list[int]
    shard: ShardEntry
    source: str
    text: str | None


def store_definition(origin: Path, data_dir: Path) -> Path:
    """Copy the tokenizer's definition into the data folder, which then explains its ids wherever it is taken."""
    file = find_definition(origin)
    target = data_dir / ("tokenizer.json" if file.suffix == ".json" else "tokenizer.model")
    with new_file(target) as written:
        written.write(file.read_bytes())
    return target


def require_split(folder: Path) -> Path:
    """``folder``, when it is a split.

    Raises:
        ShardError: it is a data or run folder: names the splits in it.
    """
    manifests = (*folder.glob(f"*/{MANIFEST_NAME}"), *folder.glob(f"data/*/{MANIFEST_NAME}"))
    inside = sorted(path.parent for path in manifests if not any(path.parent.glob(f"*/{MANIFEST_NAME}")))
    if inside:
        raise ShardError(
            f"{folder} is no split; name one of those in it: {', '.join(map(str, inside))}", mistake=True
        )
    return folder


def load_split_tokenizer(split_dir: Path, path: Path | None = None) -> Tokenizer:
    """The tokenizer a split was made with: from ``path``, from the copy beside the split, or from where it was.

    Raises:
        TokenizerError: there is none.
    """
    manifest = Manifest.read(split_dir)
    stated = checked(
        TokenizerConfig,
        manifest.provenance.get("tokenizer", {}),
        f"{split_dir / MANIFEST_NAME}: provenance.tokenizer",
        remedy="name the tokenizer with --tokenizer",
        raises=partial(TokenizerError, mistake=True),
    )
    copies = (split_dir.absolute().parent / name for name in ("tokenizer.json", "tokenizer.model"))
    place = path or next((copy for copy in copies if copy.is_file()), stated.path)
    if place is None:
        raise TokenizerError(
            f"{split_dir}: no tokenizer is stored beside it; name one with --tokenizer", mistake=True
        )
    tokenizer = load_tokenizer(stated, place, verified=True)
    if tokenizer.fingerprint == manifest.tokenizer_fingerprint or "encoder" in stated.model_fields_set:
        return tokenizer
    # Manifests did not always say which encoder was used: where the fast one differs, it was the reference.
    return load_tokenizer(stated.model_copy(update={"encoder": tokenizer.reference_name}), place)


def read_sequence(split_dir: Path, index: int, tokenizer: Tokenizer | None = None) -> StoredSequence:
    """Sequence ``index`` of a split, decoded with ``tokenizer``.

    Raises:
        ShardError: a shard is damaged, there is no such sequence, or the split was made with another tokenizer.
    """
    manifest = Manifest.read(split_dir)
    dataset = ShardDataset(split_dir, manifest.sequence_length, partial=True)
    if not 0 <= index < len(dataset):
        raise ShardError(f"{split_dir} holds sequences 0 to {len(dataset) - 1}, not {index}", mistake=True)
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise ShardError(
            f"{split_dir} was made with another tokenizer ({manifest.tokenizer}, fingerprint "
            f"{manifest.tokenizer_fingerprint}); this one has {tokenizer.fingerprint}",
            mistake=True,
        )
    ids = dataset[index].tolist()
    shard = dataset.shard_of(index)
    text = tokenizer.decode(ids) if tokenizer is not None else None
    return StoredSequence(index, ids, shard, manifest.sources[shard.source].name, text)
