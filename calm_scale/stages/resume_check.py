"""May a run go on under this configuration? For `config validate --resume`, dry runs and `submit`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.diff import ResumeDiff, resume_diff
from calm_scale.checkpoint.errors import ResumeRefusedError
from calm_scale.checkpoint.judge import inventory, newest, resumable
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK, EXIT_USAGE
from calm_scale.config.run import TRAINED, Trained
from calm_scale.stages.before_start import fingerprints, manifest_of, split_of
from calm_scale.stages.splits import as_prepared


def print_resume_diff(config: RunConfig, run: Path, accept: Sequence[str]) -> int:
    """Print the field-by-field answer for every stage that has a checkpoint; 0 when all of them may resume."""
    console = Console()
    cards: dict[Trained, Card] = {}
    for stage in TRAINED:
        entries = inventory(run / stage / "checkpoints")
        complete = resumable(entries)
        if complete and complete[0].card is not None:
            cards[stage] = complete[0].card
            for entry in entries:
                if entry.step > complete[0].step:
                    line = f"{stage}: passed over {entry.path.name}: {entry.reason}"
                    console.print(Text(line, style="yellow"), soft_wrap=True)
    if not cards:
        raise ConfigError(f"{run}: holds no complete checkpoint of the autoencoder or the language model")
    refused = False
    for stage, card in cards.items():
        diff = _diff(config, stage, card)
        refused = refused or bool(diff.refused(accept))
        console.print(
            f"{stage} at step {card.step}: {diff.num_same} fields the same, {len(diff.changes) or 'none'} changed",
            soft_wrap=True,
            highlight=False,
        )
        if diff.changes:
            console.print(_changes(diff, accept))
    console.print("This run cannot resume with these changes." if refused else "This run may resume.")
    return EXIT_USAGE if refused else EXIT_OK


def _changes(diff: ResumeDiff, accept: Sequence[str]) -> Table:
    table = Table()
    for heading in ("field", "checkpoint", "now", "verdict"):
        table.add_column(heading, overflow="fold")
    for change in diff.changes:
        table.add_row(change.field, repr(change.old), repr(change.new), change.answer(accept))
    return table


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
