"""May a run go on under this configuration? For `config validate --resume`, dry runs and `submit`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.diff import WORDS, ResumeDiff, resume_diff
from calm_scale.checkpoint.errors import ResumeRefusedError
from calm_scale.checkpoint.judge import newest
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.exit_codes import EXIT_OK, EXIT_USAGE
from calm_scale.config.notes import TRAINED, Trained
from calm_scale.stages.before_start import fingerprints, manifest_of, split_of
from calm_scale.stages.splits import as_prepared


def print_resume_diff(config: RunConfig, run: Path, accept: Sequence[str]) -> int:
    """Print the field-by-field answer for every stage that has a checkpoint; 0 when all of them may resume."""
    found = {stage: newest(run / stage / "checkpoints") for stage in TRAINED}
    cards = {
        stage: entry.card for stage, entry in found.items() if entry is not None and entry.card is not None
    }
    if not cards:
        raise ConfigError(f"{run}: holds no complete checkpoint of the autoencoder or the language model")
    refused = False
    console = Console()
    for stage, card in cards.items():
        diff = _diff(config, stage, card)
        stands = diff.refused(accept)
        refused = refused or bool(stands)
        table = Table(
            title=f"{stage} at step {card.step}: {diff.num_same} fields the same", title_justify="left"
        )
        for heading in ("field", "checkpoint", "now", "verdict"):
            table.add_column(heading, overflow="fold")
        for change in diff.changes:
            accepted = change.verdict == "results" and change not in stands
            verdict = "changes results: accepted" if accepted else WORDS[change.verdict]
            verdict += f": {change.reason}" if change.reason else ""
            table.add_row(change.field, repr(change.old), repr(change.new), verdict)
        console.print(table)
    console.print("This run may not resume like that." if refused else "This run may resume.")
    return EXIT_USAGE if refused else EXIT_OK


def resume_refusals(config: RunConfig, stages: Sequence[str], accept: Sequence[str] = ()) -> list[str]:
    """Why these stages would not go on from the newest checkpoints in the run's own folder."""
    found = []
    for stage in TRAINED:
        entry = newest(config.workdir / stage / "checkpoints") if stage in stages else None
        if entry is not None and entry.card is not None:
            try:
                _diff(config, stage, entry.card).check(accept)
            except ResumeRefusedError as error:
                found.append(f"{entry.path}: {error}")
    return found


def _diff(config: RunConfig, stage: Trained, card: Card) -> ResumeDiff:
    manifest = manifest_of(config, split_of(config, stage))
    now = config if manifest is None else as_prepared(config, manifest)
    return resume_diff(card, now.model_dump(mode="json"), stage, fingerprints(config, stage))
