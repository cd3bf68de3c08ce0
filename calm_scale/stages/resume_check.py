"""`config validate --resume RUN`: what resuming a run under this configuration would change. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.diff import WORDS, resume_diff
from calm_scale.checkpoint.inventory import inventory
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.exit_codes import EXIT_OK, EXIT_USAGE
from calm_scale.config.notes import TRAINED
from calm_scale.stages.before_start import fingerprints


def print_resume_diff(config: RunConfig, run: Path, accept: Sequence[str]) -> int:
    """Print the field-by-field answer for every stage that has a checkpoint; 0 when all of them may resume."""
    cards = {
        stage: card for stage in TRAINED if (card := _newest_card(run / stage / "checkpoints")) is not None
    }
    if not cards:
        raise ConfigError(f"{run}: holds no complete checkpoint of the autoencoder or the language model")
    refused = False
    console = Console()
    for stage, card in cards.items():
        diff = resume_diff(card, config.model_dump(mode="json"), stage, fingerprints(config, stage))
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
            table.add_row(change.field, repr(change.old), repr(change.new), verdict)
        console.print(table)
    console.print("This run may not resume like that." if refused else "This run may resume.")
    return EXIT_USAGE if refused else EXIT_OK


def _newest_card(checkpoints: Path) -> Card | None:
    complete = [
        entry for entry in inventory(checkpoints) if entry.state == "complete" and entry.card is not None
    ]
    return max(complete, key=lambda entry: entry.step).card if complete else None
