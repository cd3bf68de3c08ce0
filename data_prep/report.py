"""What a prep reports when it is done: a table for people, a file for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from calm_scale.config.files import write_atomically
from data_prep.manifest import Manifest
from data_prep.usable import SourceCounts

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
