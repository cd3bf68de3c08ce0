"""One call from configurations and run folders to a report, and one from a report to its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from calm_scale.accounting.report.console import print_document
from calm_scale.accounting.report.document import Document, Section
from calm_scale.accounting.report.model_sections import (
    components_section,
    convention_section,
    table1_section,
)
from calm_scale.accounting.report.plain import to_json, to_markdown
from calm_scale.config.run import RunConfig


@dataclass(frozen=True)
class Subject:
    """What a report is about: a configuration, and the folder of its run where there is one."""

    config: RunConfig
    folder: Path | None = None


def build(subjects: Sequence[Subject]) -> Document:
    """The report on one or several models and runs."""
    sections: list[Section] = [convention_section(), table1_section()]
    for subject in subjects:
        if subject.config.lm is not None:
            sections.append(components_section(subject.config))
    names = ", ".join(subject.config.name for subject in subjects)
    return Document(f"FLOPs report: {names}" if names else "FLOPs report", tuple(sections))


def emit(
    document: Document,
    *,
    html_file: Path | None = None,
    json_file: Path | None = None,
    markdown: bool = False,
    console: Console | None = None,
) -> None:
    """Print the report (tables, or Markdown on request) and write the files asked for."""
    if json_file is not None:
        json_file.write_text(to_json(document) + "\n", encoding="utf-8")
    if markdown:
        print(to_markdown(document), end="")
    else:
        print_document(document, console)
