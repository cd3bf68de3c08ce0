"""One call from configurations and run folders to a report, and one from a report to its files."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from rich.console import Console

import calm_scale
from calm_scale.accounting.components import Comparison
from calm_scale.accounting.hardware import DEVICES
from calm_scale.accounting.kernels import DETERMINISTIC_COST
from calm_scale.accounting.report.document import Column, Document, Section, Table
from calm_scale.accounting.report.layout_sections import (
    communication_section,
    memory_section,
    stages_section,
)
from calm_scale.accounting.report.model_sections import (
    autoencoder_section,
    components_section,
    convention_section,
    crossover_section,
    patch_size_section,
    sampling_section,
    table1_section,
)
from calm_scale.accounting.report.render import print_document, shortened, to_html, to_json, to_markdown
from calm_scale.accounting.report.run_sections import Prices, run_section
from calm_scale.accounting.report.scores import scores_section
from calm_scale.config import config_hash
from calm_scale.config.files import write_output
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import RunFolder, Stage
from calm_scale.record import ledger


@dataclass(frozen=True)
class Subject:
    """What a report is about: a configuration, and the folder of its run where there is one."""

    config: RunConfig
    folder: Path | None = None


def build(
    subjects: Sequence[Subject],
    *,
    twins: Mapping[str, Sequence[Comparison]] | None = None,
    prices: Prices | None = None,
) -> Document:
    """The report on one or several models and runs.

    Args:
        subjects: configurations and run folders, in the order they shall appear.
        twins: by run name, what counting a tiny twin gave (run elsewhere: counting needs torch).
        prices: for cost and energy lines.

    Raises:
        UtilizationError: a ledger claims more work than its devices can do.
        LedgerError: nothing in a ledger can be read, or its format is newer.
    """
    given, subjects = subjects, _distinct([_as_run(subject) for subject in subjects])
    sections: list[Section] = [convention_section(), table1_section()]
    for subject in subjects:
        sections += _about(subject, twins or {}, prices or Prices())
    runs = [(s.config, s.folder) for s in subjects if s.config.lm is not None and s.folder is not None]
    scored = scores_section([(config, folder) for config, folder in runs if folder is not None])
    if scored is not None:
        sections.append(scored)
    sections.append(provenance_section([subject.config for subject in given]))
    names = ", ".join(subject.config.name for subject in subjects)
    return Document(f"FLOPs report: {names}" if names else "FLOPs report", tuple(sections))


def emit(
    document: Document,
    *,
    html_file: Path | None = None,
    json_file: Path | None = None,
    markdown: bool = False,
    short: bool = False,
    console: Console | None = None,
) -> None:
    """Print the report (tables, or Markdown on request) and write the files asked for.

    With ``short`` only what runs did is printed, and where the whole report lies.
    """
    for path, render in ((html_file, to_html), (json_file, to_json)):
        if path is not None:
            write_output(path, render(document) + "\n")
    printed = shortened(document) if short else document
    if markdown:
        print(to_markdown(printed), end="")
    else:
        print_document(printed, console)
    for path in (html_file, json_file) if short else ():
        if path is not None:
            print(f"whole report: {path}")


def _as_run(subject: Subject) -> Subject:
    """The subject with the data-parallel size its last attempt ran at, where the configuration leaves it open."""
    lm, folder = subject.config.lm, subject.folder
    book = RunFolder(folder).stage(Stage.LM).ledger if folder is not None else None
    if lm is None or lm.parallel.data is not None or book is None or not book.is_file():
        return subject
    last = ledger.history(book).events[-1:]
    data = max((event.world_size for event in last), default=1) // lm.parallel.model_parallel
    parallel = lm.parallel.model_copy(update={"data": max(1, data)})
    updated = lm.model_copy(update={"parallel": parallel})
    return replace(subject, config=subject.config.model_copy(update={"lm": updated}))


def _distinct(subjects: Sequence[Subject]) -> list[Subject]:
    """Subjects under names that differ: a repeated one gets its number."""
    seen: Counter[str] = Counter()
    found = []
    for subject in subjects:
        name = subject.config.name
        seen[name] += 1
        number = f"-{seen[name]}" if seen[name] > 1 else ""
        found.append(replace(subject, config=subject.config.model_copy(update={"name": name + number})))
    return found


def _about(subject: Subject, twins: Mapping[str, Sequence[Comparison]], prices: Prices) -> list[Section]:
    config = subject.config
    found: list[Section] = []
    if config.deterministic:
        found.append(Section("deterministic", "Deterministic kernels", (DETERMINISTIC_COST,)))
    if subject.folder is not None:
        found.append(run_section(config, subject.folder, prices))
    if config.lm is not None:
        found += [
            components_section(config),
            stages_section(config),
            patch_size_section(config),
            crossover_section(config),
            sampling_section(config),
            memory_section(config),
            communication_section(config),
        ]
    elif config.autoencoder is not None:
        found.append(autoencoder_section(config))
    if config.name in twins:
        found.append(twin_section(config.name, twins[config.name]))
    return found


PACKAGES = ("calm-scale", "pydantic", "matplotlib", "torch", "megatron-core", "deepspeed")


def provenance_section(configs: list[RunConfig]) -> Section:
    """Hashes, commit and versions, and the table of peaks."""
    facts = [(f"configuration {config.name}", config_hash(config)) for config in configs]
    facts += [
        ("commit", _commit()),
        ("written", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("python", platform.python_version()),
        *((name, _version(name)) for name in PACKAGES),
    ]
    peaks = tuple((d.key, d.peak, d.memory, d.source) for d in DEVICES)
    tables = (
        Table("provenance", "Provenance", (Column("what", "What"), Column("value", "Value")), tuple(facts)),
        Table(
            "peaks",
            "Peaks on record (dense bf16)",
            (
                Column("device", "Device"),
                Column("peak", "FLOP/s", "flops"),
                Column("memory", "Memory", "bytes"),
                Column("source", "Source"),
            ),
            peaks,
            note="A device that is not listed has no MFU.",
        ),
    )
    return Section("provenance", "Provenance", (), tables)


def _commit() -> str:
    """The commit of the source tree this program runs from, or ``unknown`` outside of one."""
    root = Path(calm_scale.__file__).parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = " (with local changes)" if _git(root, "status", "--porcelain", "--", ".") else ""
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + changed


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def twin_section(name: str, comparisons: Sequence[Comparison]) -> Section:
    """Symbolic count beside torch's counter, for a tiny twin of the run."""
    rows = tuple(
        (c.what, c.symbolic, c.counted, c.symbolic - c.counted, c.note or ("" if c.agrees else "UNEXPLAINED"))
        for c in comparisons
    )
    columns = (
        Column("what", "What"),
        Column("symbolic", "Our count", "integer"),
        Column("counted", "torch's counter", "integer"),
        Column("difference", "Difference", "integer"),
        Column("note", "Why"),
    )
    text = (
        "A twin of this architecture at tiny widths was run forward and backward under torch's FLOP counter, attention "
        "as plain products; FLOPs per position."
    )
    table = Table("twin", f"{name}: count against execution", columns, rows)
    return Section(f"twin.{name}", f"{name}: proof by counting", (text,), (table,))
