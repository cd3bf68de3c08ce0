"""``prep inspect``: what a prepared split holds, for people."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.files import checked, is_regular, new_file, refuse_unwritable, write_output
from data_prep.errors import ShardMistakeError, TokenizerMistakeError
from data_prep.manifest import MANIFEST_NAME, Manifest, ShardEntry
from data_prep.reading import ShardDataset
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.tokenizer_spec import find_definition

_LONGEST_BAR = 40
_PICTURES = ("png", "pdf", "svg", "eps", "jpg", "jpeg", "webp")


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
