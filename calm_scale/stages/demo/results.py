"""What the demo's run wrote, read back from disk: the numbers of the summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm_scale.checkpoint.judge import find
from calm_scale.config.run_folder import RunFolder, Stage
from calm_scale.evaluation.evaluate import EvaluationResult
from calm_scale.evaluation.report import load as load_evaluation
from calm_scale.record import ledger
from calm_scale.record.metrics import Row, read_metrics
from calm_scale.stages.demo.commands import DemoError
from calm_scale.stages.demo.layout import DemoFolder


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Results:
    """The demo's results.

    ``layouts`` are the LM's layouts in the order they trained, ``resumed_at`` the step the second one took over.
    ``training_flops`` is what the language model and the autoencoder of this size cost by the accounting's count.
    """

    autoencoder_rows: list[Row]
    lm_rows: list[Row]
    evaluation: EvaluationResult
    layouts: list[str]
    resumed_at: int
    samples: list[Sample]
    training_flops: float

    @property
    def token_accuracy(self) -> float:
        """Held-out token accuracy of the autoencoder at its end, a fraction."""
        return float(last(self.autoencoder_rows, "eval/token_accuracy"))

    @property
    def tokens_per_second(self) -> float:
        """Median training speed of the language model over its last half."""
        rows = self.lm_rows[len(self.lm_rows) // 2 :]
        speeds = sorted(float(row["tokens_per_s"]) for row in rows)
        return speeds[len(speeds) // 2]

    def document(self, seconds: float) -> dict[str, Any]:
        """``summary.json``."""
        score = self.evaluation.score
        return {
            "ae_token_accuracy": self.token_accuracy,
            "brier": list(score.components),
            "brier_intervals": [
                list(interval) if interval else None for interval in score.component_intervals
            ],
            "brierlm": score.brierlm,
            "brierlm_interval": list(score.brierlm_interval) if score.brierlm_interval else None,
            "lm_layouts": self.layouts,
            "resumed_at_step": self.resumed_at,
            "lm_steps": self.lm_rows[-1]["step"],
            "lm_loss": last(self.lm_rows, "eval/loss"),
            "tokens_per_s": self.tokens_per_second,
            "training_flops": self.training_flops,
            "seconds": seconds,
        }


def read_results(folder: DemoFolder, training_flops: float, layouts: list[str]) -> Results:
    """Read everything; a missing piece is an error, not a gap in the report."""
    past = ledger.history(RunFolder(folder.run).stage(Stage.LM).ledger)
    starts = [event for event in past.events if event.kind == "start"]
    if len(starts) < 2:
        raise DemoError(
            f"{folder.run / 'lm'}: the language model was to be stopped and resumed, but it was not"
        )
    lm_rows = read_metrics(RunFolder(folder.run).stage(Stage.LM).metrics)
    return Results(
        autoencoder_rows=read_metrics(RunFolder(folder.run).stage(Stage.AUTOENCODER).metrics),
        lm_rows=lm_rows,
        evaluation=load_evaluation(
            RunFolder(folder.run).evaluations / f"step_{lm_rows[-1]['step']:08d}.json"
        ),
        layouts=layouts,
        resumed_at=starts[-1].first_step,
        samples=_samples(folder.samples),
        training_flops=training_flops,
    )


def last(rows: list[Row], name: str) -> Any:
    """The last value of a number in the record."""
    for row in reversed(rows):
        if row.get(name) is not None:
            return row[name]
    raise DemoError(f"the record holds no {name}")


def newest_layout(checkpoints: Path) -> str:
    """The layout that wrote the newest checkpoint, from its card: ``tp2 pp1 dp1``."""
    card = find(checkpoints).card
    if card is None:
        raise DemoError(f"{checkpoints}: the newest checkpoint has no card")
    return card.layout


def _samples(path: Path) -> list[Sample]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Sample(row["prompt"], row["text"]) for row in rows]
