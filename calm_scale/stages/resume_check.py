"""`config validate --resume RUN`: what resuming a run under this configuration would change. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from calm_scale.checkpoint.diff import WORDS, resume_diff
from calm_scale.checkpoint.judge import newest
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.exit_codes import EXIT_OK, EXIT_USAGE
from calm_scale.config.notes import TRAINED
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
        manifest = manifest_of(config, split_of(config, stage))
        now = config if manifest is None else as_prepared(config, manifest)
        diff = resume_diff(card, now.model_dump(mode="json"), stage, fingerprints(config, stage))
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
