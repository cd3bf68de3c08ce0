"""`calm-scale flops`: one report on configurations and run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calm_scale.accounting.report.build import Subject, build, emit
from calm_scale.accounting.report.run_sections import Prices
from calm_scale.accounting.twin import Comparison
from calm_scale.config import ConfigError, load
from calm_scale.config.errors import EXIT_OK


def report(
    targets: Sequence[Path],
    overrides: Sequence[str],
    *,
    html_file: Path | None = None,
    json_file: Path | None = None,
    markdown: bool = False,
    short: bool = False,
    count: bool = False,
    prices: Prices | None = None,
) -> int:
    """Print the report and write the files asked for. Returns the exit code.

    With ``short`` only what runs did is printed; the files hold everything. With ``count`` a tiny twin of each model
    is run under torch's FLOP counter and compared with the formulas.

    Raises:
        ConfigError: ``short`` without a run folder.
    """
    if short and not any(target.is_dir() for target in targets):
        raise ConfigError("--short says what runs did: name a run's folder")
    subjects = [Subject(load(target, overrides), target if target.is_dir() else None) for target in targets]
    twins = _twins(subjects) if count else None
    emit(
        build(subjects, twins=twins, prices=prices),
        html_file=html_file,
        json_file=json_file,
        markdown=markdown,
        short=short,
    )
    return EXIT_OK


def _twins(subjects: Sequence[Subject]) -> dict[str, Sequence[Comparison]]:
    from calm_scale.stages.flop_twin import compare

    return {subject.config.name: compare(subject.config) for subject in subjects}
