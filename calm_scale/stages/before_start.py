"""Checks before a job starts: the document, the prepared data and the checkpoints. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calm_scale.autoencoder import CARD_FILE, read_card
from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.diff import ResumeDiff, resume_diff
from calm_scale.checkpoint.errors import ResumeRefusedError
from calm_scale.checkpoint.judge import inventory, newest, resumable
from calm_scale.config import CalmScaleError, ConfigError, RunConfig, load
from calm_scale.config.errors import EXIT_OK, EXIT_USAGE
from calm_scale.config.run import notes, step_notes
from calm_scale.config.run_folder import TRAINED, RunFolder, Stage
from calm_scale.stages.splits import as_prepared, open_training_split, prepared_otherwise, training_split
from data_prep.shards.manifest import MANIFEST_NAME, Manifest


def all_notes(
    config: RunConfig, path: Path, overrides: Sequence[str] = (), stage: Stage | None = None
) -> list[str]:
    """What is noteworthy of the document, of what ``overrides`` make of the file it comes from, and of its data."""
    lines = notes(config, stage)
    if overrides:
        with contextlib.suppress(ConfigError):  # the file alone is no run: nothing to compare with
            lines += step_notes(load(path), config)
    if config.data is not None:
        seen = {split: manifest_of(config, split) for split in _trained_on(config)}
        for split, manifest in seen.items():
            other = prepared_otherwise(config, manifest) if manifest is not None else []
            lines += [f"{config.data / split}: {text}" for text in other]
    if stage is None and config.lm is not None:
        split = config.evaluation.split
        lines += [
            f"{line} or `eval` will fail"
            for line in _made_by_prep(config, split, f"evaluation.split is {split}")
        ]
    return [f"note: {line}" for line in lines]


def problems(config: RunConfig, stages: Sequence[Stage] | None = None) -> list[str]:
    """Why these stages (None: all of the run's) would be refused, as far as it can be told from here.

    What is not there yet (data before prep, an autoencoder before its training) is no problem.
    """
    chain = config.stages if stages is None else stages
    found: list[str] = []
    for stage in chain:  # an evaluation asks of the training before it
        try:
            if stage == Stage.PREP:
                _check_prep(config)
            elif stage in TRAINED:
                found += _training(config, stage, chain)
        except (CalmScaleError, OSError) as error:
            found.append(str(error))
    return found


def fingerprints(config: RunConfig, stage: Stage) -> dict[str, str | None]:
    """``Identity.fingerprints`` of a training stage, those that are seen from here."""
    seen: dict[str, str | None] = {}
    if (manifest := manifest_of(config, training_split(config, stage))) is not None:
        seen["tokenizer_fingerprint"] = manifest.tokenizer_fingerprint
        seen["shards_fingerprint"] = manifest.fingerprint
    if stage == Stage.AUTOENCODER or (config.lm is not None and config.lm.predicts_tokens):
        seen["autoencoder_fingerprint"] = None
    elif (config.autoencoder_export / CARD_FILE).is_file():
        seen["autoencoder_fingerprint"] = read_card(config.autoencoder_export).fingerprint
    return seen


def manifest_of(config: RunConfig, split: str) -> Manifest | None:
    """The manifest of a prepared split; None where there is none."""
    folder = config.data_dir / split
    return Manifest.read(folder) if (folder / MANIFEST_NAME).is_file() else None


def _trained_on(config: RunConfig) -> list[str]:
    return sorted({training_split(config, stage) for stage in TRAINED if stage in config.stages})


def _check_prep(config: RunConfig) -> None:
    from data_prep.prep.prep_plan import check_tokenizer
    from data_prep.tokenizer import load_tokenizer

    if (
        config.prep is None
        or any(config.data_dir.glob(f"*/{MANIFEST_NAME}"))
        or not config.tokenizer_path.exists()
    ):
        return
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path, verified=True)
    check_tokenizer(config.prep, config.vocab_size, tokenizer)


def _training(config: RunConfig, stage: Stage, chain: Sequence[Stage]) -> Iterator[str]:
    if not config.has(stage):
        return
    split = training_split(config, stage)
    if (config.data_dir / split / MANIFEST_NAME).is_file():
        patches = config.require_stage(stage).sample_patches
        open_training_split(config, split, patches * config.patch_size)
    else:
        reason = (
            "the language model trains on train" if stage == Stage.LM else f"autoencoder.split is {split}"
        )
        yield from _made_by_prep(config, split, reason)
    needs_export = (
        stage == Stage.LM and fingerprints(config, stage).get("autoencoder_fingerprint") is not None
    )
    if needs_export and Stage.AUTOENCODER not in chain:
        manifest = manifest_of(config, split)
        card = read_card(config.autoencoder_export)
        yield from (
            f"{config.autoencoder_export}: this autoencoder does not fit the run: {text}"
            for text in card.misfits(config, manifest.tokenizer_fingerprint if manifest else None)
        )


def _made_by_prep(config: RunConfig, split: str, who: str) -> Iterator[str]:
    """A split that is not there and that the run's own prep will not make."""
    if config.prep is None or config.data is not None or (config.data_dir / split / MANIFEST_NAME).is_file():
        return
    if config.prep.splits.share(split) <= 0:
        remedy = "lower prep.splits.heldout" if split == "train" else f"set prep.splits.{split}"
        yield f"{who}, but prep.splits gives {split} no share of the documents; {remedy}"


def print_resume_diff(config: RunConfig, run: Path, accept: Sequence[str]) -> int:
    """Print the field-by-field answer for every stage that has a checkpoint; 0 when all of them may resume."""
    console = Console()
    cards: dict[Stage, Card] = {}
    for stage in TRAINED:
        entries = inventory(RunFolder(run).stage(stage).checkpoints)
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
    """Why these stages would not resume from the newest checkpoints in the run's own folder."""
    found = []
    for stage in TRAINED:
        entry = newest(config.folder.stage(stage).checkpoints) if stage in stages else None
        if entry is not None and entry.card is not None:
            try:
                _diff(config, stage, entry.card).check(accept)
            except ResumeRefusedError as error:
                found.append(f"{entry.path}: {error}")
    return found


def _diff(config: RunConfig, stage: Stage, card: Card) -> ResumeDiff:
    manifest = manifest_of(config, training_split(config, stage))
    now = config if manifest is None else as_prepared(config, manifest)
    return resume_diff(card, now.model_dump(mode="json"), stage, fingerprints(config, stage))
