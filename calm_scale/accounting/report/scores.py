"""BrierLM scores of runs, read from their evaluations, over the FLOPs behind them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calm_scale.accounting.compared_models import TABLE_1
from calm_scale.accounting.costs import (
    run_totals,
    tokens_per_step,
)
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Column, Picture, Section, Table
from calm_scale.accounting.report.pictures import ScorePoint
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.evaluation import describe_protocol, follows_the_paper
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import RunFolder


def scores_section(runs: list[tuple[RunConfig, Path]]) -> Section | None:
    """BrierLM against training FLOPs for all runs, a picture for each protocol and text; None where nothing was
    evaluated. The paper's scores are drawn only beside those of its own text and protocol."""
    found = [(config, score) for config, folder in runs for score in scores(folder)]
    if not found:
        return None
    rows = tuple(
        (
            config.name,
            score.step,
            score.brierlm,
            *score.interval,
            score.undefined_because or "",
            score.text or "",
            score.protocol,
        )
        for config, score in found
    )
    columns = (
        Column("run", "Run"),
        Column("step", "Step", "integer"),
        Column("brierlm", "BrierLM", "number"),
        Column("low", "low", "number"),
        Column("high", "high", "number"),
        Column("why", "Undefined because"),
        Column("text", "Text"),
        Column("protocol", "Protocol"),
    )
    kinds = {(score.text, score.protocol): score.follows_the_paper for _, score in found}
    drawn = [
        _scores_picture(
            number, text, protocol, [(c, s) for c, s in found if (s.text, s.protocol) == (text, protocol)]
        )
        for number, (text, protocol) in enumerate(kinds)
    ]
    note = "An undefined BrierLM has no point. Scores of different protocols or texts do not compare."
    beside = (
        "Crosses are the paper's Table 1."
        if any(kinds.values())
        else (
            "The paper's Table 1 is measured on WikiText-103 at every patch boundary and T = 1 "
            "(configs/eval/wikitext103.yaml); it is not drawn beside these."
        )
    )
    return Section(
        "brierlm",
        "BrierLM over training FLOPs",
        (beside, note),
        (Table("brierlm", "Evaluations", columns, rows),),
        tuple(drawn),
    )


def _scores_picture(
    number: int, text: str | None, protocol: str, found: list[tuple[RunConfig, Score]]
) -> Picture:
    """The scores of one protocol on one text."""
    drawn = [point for config, score in found for point in points(config, [score])]
    paper = paper_points() if all(score.follows_the_paper for _, score in found) else []
    picture = pictures.score_over_flops([*paper, *drawn])
    name = ", ".join(part for part in (text, protocol) if part)
    key = picture.key if number == 0 else f"{picture.key}_{number + 1}"
    return replace(picture, key=key, title=f"{picture.title}: {name}" if name else picture.title)


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
    results = RunFolder(folder).evaluations
    others = Counter(str(path.parent.relative_to(results)) for path in results.glob("*/**/step_*.json"))
    return len(list(results.glob("step_*.json"))), dict(sorted(others.items()))


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
    for path in sorted(RunFolder(folder).evaluations.rglob("*.json")):
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
                _protocol_of(path.parent.relative_to(RunFolder(folder).evaluations), stored),
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
