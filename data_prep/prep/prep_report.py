"""What a prep reports when it is done: a table for people, a file for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.files import (
    checked,
    is_regular,
    new_file,
    refuse_unwritable,
    write_atomically,
    write_output,
)
from calm_scale.config.terminal import counted
from data_prep.errors import ShardError, ShardMistakeError, TokenizerMistakeError
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
_LONGEST_BAR = 40
_PICTURES = ("png", "pdf", "svg", "eps", "jpg", "jpeg", "webp")


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

    def show(self, console: Console | None = None) -> None:
        """Print the summary table."""
        console = console or Console(highlight=False, markup=False)
        rate = self.steady_bytes / self.steady_seconds / 1e6 if self.steady_seconds else 0.0
        table = Table(title=f"prep · {self.data_dir}", title_justify="left")
        for column in ("split", "documents", "sequences", "tokens", "padding", "tail"):
            table.add_column(column, justify="left" if column == "split" else "right")
        for s in self.splits:
            table.add_row(
                s.name, *(f"{n:,}" for n in (s.documents, s.num_sequences, s.tokens, s.padding, s.tail))
            )
        console.print(table)
        rejected = self.documents["quarantined"]
        console.print(
            f"{self.documents['read']:,} records read, {self.documents['kept']:,} documents kept, "
            f"{sum(rejected.values()):,} quarantined"
        )
        if self.already_done:
            console.print("already complete: nothing was redone")
        else:
            console.print(
                f"{self.text_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:,.1f} MB/s once started, "
                f"workers: {self.workers}, {self.peak_megabytes:,.0f} MB each at most, encoder: {self.encoder})"
            )
        for kind, count in rejected.items():
            console.print(f"  quarantined · {kind}: {count:,}")
        for name, why in self.corrupt_inputs.items():
            console.print(f"  left out · {name}: {why}")
        self._show_sources(console)
        if self.notes.get("zstd_frames_without_checksum"):
            bare, frames = self.notes["zstd_frames_without_checksum"], self.notes["zstd_frames"]
            console.print(
                f"  {bare:,} of {frames:,} zstd frames carry no checksum: damage inside them cannot be noticed"
            )
        if self.quarantine:
            console.print(f"  rejected records: {self.quarantine}")

    def _show_sources(self, console: Console) -> None:
        """One line a source where there are several, and one for each source or input without a usable record."""
        for number, source in enumerate(self.sources if len(self.sources) > 1 else []):
            console.print(
                f"  source {number} · {source.name}: {source.read:,} records, {source.kept:,} kept, "
                f"quarantined: {_list_kinds(source.quarantined)}"
            )
        for name, why in self.unusable_inputs.items():
            console.print(f"  no usable record · {name}: {why}")
        empty = sum(source.unusable for source in self.sources)
        if empty:
            console.print(f"  inputs without a usable record: {empty:,}")


def _list_kinds(quarantined: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in quarantined.items()) or "none"


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
        found.problems += find_shard_problems(split_dir, manifest, entry)
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


class Decodes(Protocol):
    """What inspection needs of a tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Hash of its behaviour."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        ...


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


def the_split(folder: Path) -> Path:
    """``folder``, when it is a split.

    Raises:
        ShardMistakeError: it is a data or run folder: names the splits in it.
    """
    manifests = (*folder.glob(f"*/{MANIFEST_NAME}"), *folder.glob(f"data/*/{MANIFEST_NAME}"))
    inside = sorted(path.parent for path in manifests if not any(path.parent.glob(f"*/{MANIFEST_NAME}")))
    if inside:
        raise ShardMistakeError(
            f"{folder} is no split; name one of those in it: {', '.join(map(str, inside))}"
        )
    return folder


def tokenizer_of(split_dir: Path, path: Path | None = None) -> Tokenizer:
    """The tokenizer a split was made with: from ``path``, from the copy beside the split, or from where it was.

    Raises:
        TokenizerMistakeError: there is none.
    """
    manifest = Manifest.read(split_dir)
    stated = checked(
        TokenizerConfig,
        manifest.provenance.get("tokenizer", {}),
        f"{split_dir / MANIFEST_NAME}: provenance.tokenizer",
        remedy="name the tokenizer with --tokenizer",
        raises=TokenizerMistakeError,
    )
    copies = (split_dir.absolute().parent / name for name in ("tokenizer.json", "tokenizer.model"))
    place = path or next((copy for copy in copies if copy.is_file()), stated.path)
    if place is None:
        raise TokenizerMistakeError(
            f"{split_dir}: no tokenizer is stored beside it; name one with --tokenizer"
        )
    tokenizer = load_tokenizer(stated, place, verified=True)
    if tokenizer.fingerprint == manifest.tokenizer_fingerprint or "encoder" in stated.model_fields_set:
        return tokenizer
    # Manifests did not always say which encoder was used: where the fast one differs, it was the reference.
    return load_tokenizer(stated.model_copy(update={"encoder": tokenizer.judge_name}), place)


def read_sequence(split_dir: Path, index: int, tokenizer: Decodes | None = None) -> StoredSequence:
    """Sequence ``index`` of a split, decoded with ``tokenizer``.

    Raises:
        ShardError: a shard is damaged, there is no such sequence, or the split was made with another tokenizer.
    """
    manifest = Manifest.read(split_dir)
    dataset = ShardDataset(split_dir, manifest.sequence_length, partial=True)
    if not 0 <= index < len(dataset):
        raise ShardMistakeError(f"{split_dir} holds sequences 0 to {len(dataset) - 1}, not {index}")
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise ShardMistakeError(
            f"{split_dir} was made with another tokenizer ({manifest.tokenizer}, fingerprint "
            f"{manifest.tokenizer_fingerprint}); this one has {tokenizer.fingerprint}"
        )
    ids = dataset[index].tolist()
    shard = dataset.shard_of(index)
    text = tokenizer.decode(ids) if tokenizer is not None else None
    return StoredSequence(index, ids, shard, manifest.sources[shard.source].name, text)


def show_split(split_dir: Path, console: Console | None = None) -> Manifest:
    """Print a split's counts, sources, shards and document lengths.

    Raises:
        ShardError: a shard is missing, cut, or not the manifest's.
    """
    console = console or Console(highlight=False, emoji=False)
    manifest = Manifest.read(split_dir)
    ShardDataset(split_dir, manifest.sequence_length)
    facts = Text(  # not a str: a path is no markup
        f"{split_dir} · {manifest.num_sequences:,} sequences of {manifest.sequence_length:,} {manifest.dtype} ids, "
        f"K-aligned to {manifest.alignment}, packing {manifest.packing}\n"
        f"tokenizer {manifest.tokenizer} ({manifest.tokenizer_fingerprint}), largest id {manifest.max_id:,}, "
        f"bos {manifest.bos_id}, eos {manifest.eos_id}, pad {manifest.pad_id}\nfingerprint {manifest.fingerprint}"
    )
    console.print(facts)
    for title, counts in (("documents", manifest.documents), ("tokens", manifest.tokens)):
        parts = [f"{name} {value:,}" for name, value in counts.model_dump().items() if isinstance(value, int)]
        console.print(f"{title}: {' · '.join(parts)}")
    for kind, count in manifest.documents.quarantined.items():
        console.print(f"  quarantined · {kind}: {count:,}")
    table = Table(title="sources", title_justify="left")
    for column in ("source", "weight", "sequences", "shards"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for number, source in enumerate(manifest.sources):
        shards = sum(s.source == number for s in manifest.shards)
        table.add_row(Text(source.name), f"{source.weight:g}", f"{source.num_sequences:,}", f"{shards:,}")
    console.print(table)
    most = max(manifest.length_histogram, default=0)
    for power, count in enumerate(manifest.length_histogram):
        if count:
            line = f"{2**power:>10,}–{2 ** (power + 1) - 1:<10,} tokens {count:>12,} "
            longest = min(_LONGEST_BAR, console.width - len(line))
            console.print(line + "█" * max(1, round(longest * count / most)))
    return manifest


def draw_lengths(split_dir: Path, picture: Path) -> Path:
    """Save a histogram of document lengths (tokens, base-2 bins); its place (``.png`` added where it has no extension).

    Raises:
        ShardMistakeError: the extension is of no picture that can be drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = checked_picture(picture)
    manifest = Manifest.read(split_dir)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    powers = range(len(manifest.length_histogram))
    axes.bar(powers, manifest.length_histogram, width=0.9, align="edge", color="#3b6ea8")
    axes.set_xticks(list(powers), [f"{2**p:,}" for p in powers], rotation=60)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    axes.set_title(f"{manifest.split}: {manifest.documents.kept:,} documents")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=picture.suffix[1:].lower() or "png")
    write_output(picture, drawn.getvalue())
    return picture


def checked_picture(picture: Path) -> Path:
    """Where a picture goes: ``.png`` added where ``picture`` has no extension.

    Raises:
        ShardMistakeError: it names a folder, or no format that can be drawn.
    """
    if picture.is_dir():
        raise ShardMistakeError(
            f"--picture {picture} is a folder; name a file in it: {picture / 'lengths.png'}"
        )
    refuse_unwritable(picture)
    if not is_regular(picture):
        return picture
    if not picture.suffix:
        return picture.with_name(picture.name + ".png")
    if picture.suffix[1:].lower() not in _PICTURES:
        raise ShardMistakeError(
            f"--picture {picture}: {picture.suffix} is no format that can be drawn; use one of {', '.join(_PICTURES)}"
        )
    return picture
