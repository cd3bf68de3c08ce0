"""`calm-scale flops` and `plan`: what configurations and runs cost, and layouts for a number of nodes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calm_scale.accounting.components import Comparison
from calm_scale.accounting.hardware import calibrated, device
from calm_scale.accounting.report.build import Subject, build, emit
from calm_scale.accounting.report.plan_sections import plan_document, scaling_document
from calm_scale.accounting.report.run_sections import Prices
from calm_scale.config import ConfigError, RunConfig, load
from calm_scale.config.errors import EXIT_OK

MOST_NODES = 100_000


def print_plan(
    config: RunConfig,
    *,
    nodes: str,
    gpus_per_node: int,
    gpu: str,
    price: float | None = None,
    calibration: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Print the ranked layouts and the one to take; of several numbers of nodes the best of each first.

    Args:
        calibration: what ``benchmarks/gpu.py --json`` measured on that gpu.
    """
    config.require_lm()
    counts, chip = node_counts(nodes), device(gpu)
    if calibration is not None:
        chip = calibrated(chip, calibration)
    if len(counts) == 1:
        document = plan_document(
            config, counts[0], chip, gpus_per_node=gpus_per_node, dollars_per_device_hour=price
        )
    else:
        document = scaling_document(
            config, counts, chip, gpus_per_node=gpus_per_node, dollars_per_device_hour=price
        )
    emit(document, json_file=json_file)
    return EXIT_OK


def node_counts(text: str) -> list[int]:
    """`8`, `1,2,4`, or `1..64`: the powers of two from 1 to 64 (the ends where there is none between them).

    Raises:
        ConfigError: something else, or a number outside of 1 to :data:`MOST_NODES`.
    """
    low, dots, high = text.partition("..")
    parts = [low, high] if dots else text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= MOST_NODES for part in parts):
        raise ConfigError(f"--nodes {text}: write 8, 1,2,4 or 1..64, with numbers from 1 to {MOST_NODES:,}")
    numbers = [int(part) for part in parts]
    if not dots:
        return sorted(set(numbers))
    if numbers[0] > numbers[1]:
        raise ConfigError(f"--nodes {text}: the range is empty; write the smaller number first")
    powers = [2**n for n in range(MOST_NODES.bit_length()) if numbers[0] <= 2**n <= numbers[1]]
    return powers or sorted(set(numbers))


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
