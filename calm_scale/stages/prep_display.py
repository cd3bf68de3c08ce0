"""What the prep commands print: the plan, the progress, the report, a split's contents, the picture of its lengths."""

from __future__ import annotations

import io
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from calm_scale.config import ConfigError
from calm_scale.config.files import is_regular, refuse_unwritable, write_output
from calm_scale.config.quantities import counted

if TYPE_CHECKING:
    from data_prep.prep import PassProgress
    from data_prep.prep.prep_plan import Plan
    from data_prep.prep.prep_report import PrepReport
    from data_prep.shards.manifest import Manifest

_PLAIN_SECONDS = 30.0
_LONGEST_BAR = 40
_PICTURES = ("png", "pdf", "svg", "eps", "jpg", "jpeg", "webp")


def make_console(*, soft_wrap: bool = True) -> Console:
    """Prints paths and texts as they are: what looks like markup or an emoji's name in them is neither."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def tell(line: str) -> None:
    """One line for the user on stderr."""
    sys.stderr.write(line + "\n")


class PrepProgressLine:
    """A bar on a terminal, a plain line every 30 s elsewhere, both on stderr. Call it with each ``PassProgress``."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bars = ExitStack()
        self._bar: Progress | None = None
        self._task: tuple[str, TaskID] | None = None
        self._told = time.monotonic()

    def __enter__(self) -> PrepProgressLine:
        if self._console.is_terminal:
            columns = (
                TextColumn("prep · {task.description}"),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
            )
            self._bar = self._bars.enter_context(Progress(*columns, console=self._console, transient=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def __call__(self, seen: PassProgress) -> None:
        """Show how far a pass is."""
        line = _describe_progress(seen)
        if self._bar is not None:
            if self._task is None or self._task[0] != seen.task:
                added = self._bar.add_task(seen.task, total=seen.text_bytes or None, numbers="")
                self._task = (seen.task, added)
            self._bar.update(self._task[1], completed=seen.done.text_bytes, numbers=line)
        elif time.monotonic() - self._told >= _PLAIN_SECONDS:
            self._told = time.monotonic()
            self._console.print(f"prep: {line}", highlight=False)


def _describe_progress(seen: PassProgress) -> str:
    return (
        f"{seen.done.documents:,} documents · {seen.done.text_bytes / seen.seconds / 1e6:.1f} MB/s · "
        f"{seen.done.tokens / seen.seconds / 1e6:.2f} Mtok/s · {seen.done.quarantined:,} quarantined"
    )


def show_plan(plan: Plan) -> None:
    """Print what a prep will do: inputs, disk and time."""
    console = Console(highlight=False, markup=False)
    table = Table(title="prep plan", title_justify="left")
    for column in ("source", "inputs", "stored", "text (estimate)", "weight"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for number, source in enumerate(plan.prep.sources):
        mine = [item for item in plan.inputs if item.source == number]
        size, text = sum(i.size for i in mine), sum(i.text_bytes for i in mine)
        amounts = (f"{len(mine):,}", f"{size / 1e6:,.1f} MB", f"{text / 1e6:,.1f} MB", f"{source.weight:g}")
        table.add_row(source.label, *amounts)
    console.print(table)
    segments = sum(plan.expected_segments(item) for item in plan.inputs)
    console.print(
        f"splits: {', '.join(f'{s.name} {s.high - s.low:.4g}' for s in plan.splits)} · packing: "
        f"{plan.prep.packing} · sequences of {plan.prep.sequence_length:,} {plan.dtype} ids, K-aligned to "
        f"{plan.prep.alignment}\n"
        f"about {plan.text_bytes / plan.bytes_per_token / 1e6:,.1f} M tokens, {plan.bytes_per_token:.2f} bytes "
        f"each, {plan.disk_bytes / 1e9:,.3f} GB of "
        f"shards in about {counted(segments, 'segment')} of {plan.segment_bytes / 1e6:,.1f} MB, "
        f"{_duration(plan.seconds)} with {counted(plan.prep.workers, 'worker')}"
    )


def _duration(seconds: float) -> str:
    return f"{max(seconds, 1):,.0f} s" if seconds < 60 else f"{seconds / 60:,.1f} min"


def show_report(report: PrepReport) -> None:
    """Print the summary of a finished prep."""
    console = Console(highlight=False, markup=False)
    table = Table(title=f"prep · {report.data_dir}", title_justify="left")
    for column in ("split", "documents", "sequences", "tokens", "padding", "tail"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for s in report.splits:
        amounts = (s.documents, s.num_sequences, s.tokens, s.padding, s.tail)
        table.add_row(s.name, *(f"{amount:,}" for amount in amounts))
    console.print(table)
    rejected = report.documents["quarantined"]
    console.print(
        f"{report.documents['read']:,} records read, {report.documents['kept']:,} documents kept, "
        f"{sum(rejected.values()):,} quarantined"
    )
    if report.already_done:
        console.print("already complete: nothing was redone")
    else:
        rate = report.steady_bytes / report.steady_seconds / 1e6 if report.steady_seconds else 0.0
        console.print(
            f"{report.text_bytes / 1e6:,.1f} MB in {report.seconds:.1f} s ({rate:,.1f} MB/s once started, "
            f"workers: {report.workers}, {report.peak_megabytes:,.0f} MB each at most, encoder: {report.encoder})"
        )
    for kind, count in rejected.items():
        console.print(f"  quarantined · {kind}: {count:,}")
    for name, why in report.corrupt_inputs.items():
        console.print(f"  left out · {name}: {why}")
    _show_sources(report, console)
    if report.notes.get("zstd_frames_without_checksum"):
        bare, frames = report.notes["zstd_frames_without_checksum"], report.notes["zstd_frames"]
        console.print(
            f"  {bare:,} of {frames:,} zstd frames carry no checksum: damage inside them cannot be noticed"
        )
    if report.quarantine:
        console.print(f"  rejected records: {report.quarantine}")


def _show_sources(report: PrepReport, console: Console) -> None:
    """One line a source where there are several, and one for each source or input without a usable record."""
    for number, source in enumerate(report.sources if len(report.sources) > 1 else []):
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in source.quarantined.items())
        console.print(
            f"  source {number} · {source.name}: {source.read:,} records, {source.kept:,} kept, "
            f"quarantined: {kinds or 'none'}"
        )
    for name, why in report.unusable_inputs.items():
        console.print(f"  no usable record · {name}: {why}")
    empty = sum(source.unusable for source in report.sources)
    if empty:
        console.print(f"  inputs without a usable record: {empty:,}")


def show_split(split_dir: Path, manifest: Manifest, console: Console | None = None) -> None:
    """Print a split's counts, sources, shards and document lengths."""
    console = console or make_console(soft_wrap=False)
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


def draw_lengths(manifest: Manifest, picture: Path) -> None:
    """Save a histogram of document lengths (tokens, base-2 bins) at ``picture``, which ``check_picture`` returned."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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


def check_picture(picture: Path) -> Path:
    """Where a picture goes: ``.png`` added where ``picture`` has no extension.

    Raises:
        ConfigError: it names a folder, or no format that can be drawn.
    """
    if picture.is_dir():
        raise ConfigError(f"--picture {picture} is a folder; name a file in it: {picture / 'lengths.png'}")
    refuse_unwritable(picture)
    if not is_regular(picture):
        return picture
    if not picture.suffix:
        return picture.with_name(picture.name + ".png")
    if picture.suffix[1:].lower() not in _PICTURES:
        raise ConfigError(
            f"--picture {picture}: {picture.suffix} is no format that can be drawn; use one of {', '.join(_PICTURES)}"
        )
    return picture
