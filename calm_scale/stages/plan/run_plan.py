"""The whole run in one table before anything is queued: text, tokens, disk, hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from calm_scale.accounting import hardware, layout_search
from calm_scale.accounting.costs import run_totals
from calm_scale.accounting.report.plan_sections import layout_name
from calm_scale.accounting.step_time import estimated_step, training_time
from calm_scale.config import CalmScaleError, ConfigError, RunConfig
from calm_scale.config.quantities import bytes_text, seconds_text
from calm_scale.config.run_folder import TRAINED, Stage
from calm_scale.stages.plan.disk_needs import DiskNeed, disk_rows
from calm_scale.stages.plan.dry_run import two_columns
from calm_scale.stages.prep_display import tell
from data_prep.errors import TokenizerError
from data_prep.prep.prep_plan import Estimate, estimate
from data_prep.shards.manifest import MANIFEST_NAME, Manifest
from data_prep.tokenizer.definition import find_definition
from launchers.slurm.layout import StageShape

WORTH_SAYING = 1.05
"""A run's own layout that is slower than the plan's by less than this is not mentioned."""


@dataclass(frozen=True)
class Text:
    """What is known of a run's inputs before they are read, or the problem that keeps it unknown.

    ``no_tokenizer``: prep's words where the tokenizer is not seen; empty where it is.
    """

    estimate: Estimate | None
    problem: str = ""
    no_tokenizer: str = ""

    @property
    def is_seen(self) -> bool:
        """Whether files of the text lie in sight of this machine."""
        return self.estimate is not None and self.estimate.text_bytes > 0


def look_at_text(config: RunConfig) -> Text:
    """A look at the first documents; inputs may be visible from the compute nodes only, which is no error here."""
    if config.prep is None:
        return Text(None, "no prep section")
    no_tokenizer = ""
    try:
        find_definition(config.tokenizer_path)
    except TokenizerError as error:
        no_tokenizer = str(error)
    try:
        return Text(estimate(config, tell), no_tokenizer=no_tokenizer)
    except (CalmScaleError, OSError) as error:
        return Text(None, str(error), no_tokenizer)


def lack_of_tokenizer(config: RunConfig, text: Text) -> str:
    """What is wrong where prep has yet to run, sees its text and no tokenizer; empty where nothing is.

    A machine that sees neither may just not have the nodes' filesystems.
    """
    is_prepared = any(config.data_dir.glob(f"*/{MANIFEST_NAME}"))
    return text.no_tokenizer if text.is_seen and not is_prepared else ""


def run_plan(
    config: RunConfig,
    shapes: dict[Stage, StageShape],
    text: Text,
    needs: Sequence[DiskNeed],
    chip: hardware.Device | None,
    num_runs: int = 1,
    unknown: str = "",
) -> Table:
    """Text, tokens available and needed, disk and hours of the stages in ``shapes``.

    Args:
        needs: from :func:`~calm_scale.stages.plan.disk_needs.disk_needs`, of this run or of all runs of a sweep.
        chip: for hours; None where the device is not known.
        num_runs: of a sweep; hours are those of one of them.
        unknown: what to say of the hours without a ``chip``; empty says nothing.
    """
    several = f": one of {num_runs} runs, disk of all" if num_runs > 1 else ""
    rows = [
        *_prep_rows(config, shapes.get(Stage.PREP), text),
        *_token_rows(config, text.estimate),
        *_hours(config, shapes, chip, unknown),
        *disk_rows(needs),
    ]
    return two_columns(f"the whole run {config.name}{several}", rows)


def _prep_rows(config: RunConfig, shape: StageShape | None, seen: Text) -> list[tuple[str, str]]:
    if config.prep is None or shape is None:
        return []
    text, tokenizer = seen.estimate, ("tokenizer", seen.no_tokenizer or str(config.tokenizer_path))
    if text is None:
        if seen.no_tokenizer:
            tokenizer = ("tokenizer", f"not seen from here: {seen.no_tokenizer}")
        return [("text", f"not seen from here: {seen.problem}"), tokenizer]
    how = "measured on the first documents" if text.sampled else "assumed: no tokenizer to ask"
    return [
        (
            "text",
            f"{text.num_inputs:,} inputs, {bytes_text(text.stored_bytes)} stored, {bytes_text(text.text_bytes)} of "
            f"text, about {text.num_documents:,} documents",
        ),
        tokenizer,
        ("its tokens", f"about {text.tokens:,.0f}, {text.bytes_per_token:.2f} bytes each ({how})"),
        (
            "time of prep",
            f"{seconds_text(text.seconds(shape.num_tasks))} on {shape.num_tasks} workers at 60 MB/s each",
        ),
    ]


def _token_rows(config: RunConfig, text: Estimate | None) -> list[tuple[str, str]]:
    rows = []
    totals = run_totals(config) if config.lm is not None else None
    if config.autoencoder is not None and totals is not None and totals.autoencoder_tokens:
        stage = config.autoencoder
        rows.append(
            _tokens(
                config,
                "autoencoder",
                stage.split,
                totals.autoencoder_tokens,
                text,
                stage.training.end_of_data,
            )
        )
    if config.lm is not None and totals is not None:
        rows.append(_tokens(config, "lm", "train", totals.lm_tokens, text, config.lm.training.end_of_data))
    return rows


def _tokens(
    config: RunConfig, stage: str, split: str, needed: int, text: Estimate | None, end_of_data: str
) -> tuple[str, str]:
    manifest = config.data_dir / split / MANIFEST_NAME
    available, how = 0.0, ""
    if manifest.is_file():
        available, how = float(Manifest.read(config.data_dir / split).tokens.stored), "prepared"
    elif text is not None and config.prep is not None:
        available, how = text.tokens * config.prep.splits.share(split), f"about, of split {split}"
    if not available:
        return f"tokens of {stage}", f"{needed:,} needed; how many there are is not known yet"
    epochs = needed / available
    warning = (
        "; THE DATA ENDS BEFORE THE STEPS (end_of_data: stop)" if end_of_data == "stop" and epochs > 1 else ""
    )
    return (
        f"tokens of {stage}",
        f"{needed:,} needed, {available:,.0f} available ({how}): {epochs:.2f} epochs{warning}",
    )


def _hours(
    config: RunConfig, shapes: dict[Stage, StageShape], chip: hardware.Device | None, unknown: str
) -> list[tuple[str, str]]:
    if chip is None:
        return [("training", f"hours not known: {unknown}")] if unknown else []
    times = {
        stage: training_time(config, stage, ranks=shape.num_tasks, nodes=shape.nodes, chip=chip)
        for stage in TRAINED
        if (shape := shapes.get(stage)) is not None
    }
    if not times:
        return []
    hours, devices = sum(t.hours for t in times.values()), sum(t.device_hours for t in times.values())
    parts = ", ".join(f"{stage} {time.hours:,.1f} h" for stage, time in times.items())
    rows = [
        (
            f"training on {chip.key}",
            f"{hours:,.1f} h, {devices:,.0f} GPU-hours: {parts} (estimate, see below)",
        )
    ]
    if (shape := shapes.get(Stage.LM)) is not None and (faster := _faster_layout(config, shape, chip)):
        rows.append(("a faster layout", faster))
    return rows


def _faster_layout(config: RunConfig, shape: StageShape, chip: hardware.Device) -> str:
    """What `plan` would take on the same ranks, where the run's own layout is slower; empty where it is not."""
    per_node = shape.num_tasks // shape.nodes
    try:
        best = layout_search.rank(config, shape.nodes, chip, gpus_per_node=per_node)[0]
    except ConfigError:
        return ""  # no layout of these ranks spreads the batch: nothing to compare with
    own = estimated_step(config, Stage.LM, shape.num_tasks, shape.nodes, chip)
    if not best.fits or own < WORTH_SAYING * best.time.total:
        return ""
    return (
        f"`plan` would take {layout_name(best)}: {seconds_text(best.time.total)} a step, this run's layout "
        f"{seconds_text(own)} ({own / best.time.total - 1:.0%} more); select it with "
        + " ".join(f"--set {item}" for item in best.overrides)
    )
