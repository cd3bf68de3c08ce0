"""BrierLM results of a run folder, read as plain JSON, placed on the axis of training FLOPs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm_scale.accounting.costs import run_totals, tokens_per_step
from calm_scale.accounting.paper import TABLE_1
from calm_scale.accounting.report.pictures import ScorePoint
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.evaluation import describe_protocol, follows_the_paper
from calm_scale.config.run import RunConfig


class ScoreError(CalmScaleError):
    """An evaluation file that cannot be read."""


@dataclass(frozen=True)
class Score:
    """One evaluation of a run; ``brierlm`` is None where it is undefined."""

    path: Path
    step: int
    brierlm: float | None
    interval: tuple[float | None, float | None]
    undefined_because: str | None
    protocol: str = ""
    text: str | None = None
    follows_the_paper: bool = False


def scores(folder: Path) -> list[Score]:
    """Every BrierLM result in and below ``<folder>/eval``, by protocol and step: those of the run's own first."""
    return sorted(_found(folder), key=lambda score: (len(score.path.parts), score.path.parent, score.step))


def own_and_others(folder: Path) -> tuple[int, dict[str, int]]:
    """Checkpoints scored under the run's own protocol, and how many under each other protocol or on other data.

    Files are counted by their names; none is opened.
    """
    others = Counter(
        str(path.parent.relative_to(folder / "eval")) for path in (folder / "eval").glob("*/**/step_*.json")
    )
    return len(list((folder / "eval").glob("step_*.json"))), dict(sorted(others.items()))


def flops_at(config: RunConfig, step: int) -> float:
    """Training FLOPs behind a checkpoint: its steps of the language model, and all of the autoencoder."""
    return run_totals(config, tokens=step * tokens_per_step(config)).total


def points(config: RunConfig, found: list[Score]) -> list[ScorePoint]:
    """The defined scores of a run on the FLOPs axis."""
    return [
        ScorePoint(
            f"{config.name} @ {score.step}", flops_at(config, score.step), score.brierlm, *score.interval
        )
        for score in found
        if score.brierlm is not None
    ]


def paper_points() -> list[ScorePoint]:
    """The paper's Table 1."""
    return [ScorePoint(row.model, row.training, row.brierlm, from_paper=True) for row in TABLE_1]


def _found(folder: Path) -> Iterator[Score]:
    for path in sorted((folder / "eval").rglob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ScoreError(f"{path}: not readable as an evaluation: {error}") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("score"), dict):
            continue
        score = raw["score"]
        low, high = score.get("brierlm_interval") or (None, None)
        step = _step(raw, path)
        if step is not None:
            stored = raw["protocol"] if isinstance(raw.get("protocol"), dict) else {}
            provenance = stored.get("provenance") or {}
            yield Score(
                path,
                step,
                score.get("brierlm"),
                (low, high),
                score.get("undefined_because"),
                _protocol_of(path.parent.relative_to(folder / "eval"), stored),
                provenance.get("text"),
                follows_the_paper(stored),
            )


def _protocol_of(place: Path, stored: dict[str, Any]) -> str:
    """The protocol in words, after the data where they are not the run's own."""
    data = next((part for part in place.parts if part.startswith("data-")), None)
    return ", ".join(part for part in (data, describe_protocol(stored)) if part)


def _step(raw: dict[str, Any], path: Path) -> int | None:
    """The step an evaluation is of: from its own provenance, else from its file's name."""
    for place in (raw.get("protocol", {}), raw.get("execution", {})):
        for holder in (place, *(v for v in place.values() if isinstance(v, dict))):
            if str(holder.get("step", "")).isdigit():
                return int(holder["step"])
    named = re.fullmatch(r"step_(\d+)", path.stem)
    return int(named[1]) if named else None
