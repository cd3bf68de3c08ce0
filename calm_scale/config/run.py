"""The one document of the product: a run, from raw text to scores; and settings of it that have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.data import PrepConfig, ReadingConfig, TokenizerConfig
from calm_scale.config.errors import ConfigError
from calm_scale.config.evaluation import EvaluationConfig, GenerationConfig
from calm_scale.config.lm import LMStage
from calm_scale.config.run_folder import TRAINED, RunFolder, Stage
from calm_scale.config.section import SAFE, Policy, Section, Seed
from calm_scale.config.training import LoggingConfig, OptimizerConfig, TrainingConfig


class RunConfig(Section):
    """A run. Every command takes this document and uses its own section.

    ``vocab_size`` (V) and ``patch_size`` (K) stand here once and hold for prep, autoencoder and language
    model alike. An autoregressive baseline has ``patch_size: 1`` and ``lm.head.kind: softmax``.
    """

    name: Annotated[str, SAFE] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name in folders, jobs and records; where it is left out, the file's name."""
    workdir: Annotated[Path, SAFE] = Path("runs/{name}")
    """The run's folder, which holds everything that it writes; `{name}` becomes the name."""
    seed: Annotated[Seed, Policy("forbidden", sweep=Stage.AUTOENCODER, job=Stage.PREP)] = 0
    """Seed of initialization, order of samples and noise."""
    device: Annotated[Literal["auto", "cpu", "cuda"], SAFE] = "auto"
    """Where models run; `auto` takes GPUs where there are some, and insists on them where the job asked for some."""
    deterministic: Annotated[bool, SAFE] = False
    """Use only GPU kernels that add in a fixed order, at some cost in time; see docs/checkpoints.md."""
    join_minutes: Annotated[float, SAFE] = Field(default=10.0, gt=0)
    """Minutes that the ranks wait for each other at the start, from the first one's arrival."""
    vocab_size: Annotated[
        int, Policy("forbidden", model=True, prep=True, sweep=Stage.PREP, job=Stage.PREP)
    ] = Field(default=128_256, gt=1)
    """Number of token ids V, padding and special tokens included."""
    patch_size: Annotated[int, Policy("forbidden", model=True, sweep=Stage.AUTOENCODER, job=Stage.PREP)] = (
        Field(default=4, gt=0)
    )
    """Tokens of one patch, K."""
    tokenizer: Annotated[TokenizerConfig, Policy(sweep=Stage.PREP, job=Stage.PREP)] = TokenizerConfig()
    """The tokenizer that every stage shares."""
    data: Annotated[Path | None, Policy("safe", job=Stage.PREP)] = None
    """Folder of prepared splits; null is `data` in the run's folder."""
    reading: ReadingConfig = ReadingConfig()
    """How training and evaluation read prepared splits."""
    prep: Annotated[PrepConfig | None, Policy("safe", sweep=Stage.PREP, job=Stage.PREP)] = None
    """How text becomes shards; null where `data` names prepared splits."""
    autoencoder: Annotated[
        AutoencoderStage | None, Policy("results", sweep=Stage.AUTOENCODER, job=Stage.AUTOENCODER)
    ] = None
    """The autoencoder and its training; null trains none."""
    lm: Annotated[LMStage | None, Policy("results", sweep=Stage.LM, job=Stage.LM)] = None
    """The language model and its training; null trains none."""
    evaluation: Annotated[EvaluationConfig, Policy(job=Stage.EVAL)] = EvaluationConfig()
    """The protocol of `eval`."""
    generation: GenerationConfig = GenerationConfig()
    """How `generate` draws text."""
    logging: LoggingConfig = LoggingConfig()
    """Telemetry of the trainings."""

    @model_validator(mode="before")
    @classmethod
    def _workdir_of_name(cls, raw: object) -> object:
        if isinstance(raw, dict) and isinstance(raw.get("name"), str):
            workdir = str(raw.get("workdir", "runs/{name}")).replace("{name}", raw["name"])
            return {**raw, "workdir": workdir}
        return raw

    @model_validator(mode="after")
    def _k_divides_everything(self) -> RunConfig:
        k = self.patch_size
        if self.prep is not None and self.prep.alignment % k:
            raise ValueError(f"prep.alignment {self.prep.alignment} is not a multiple of patch_size {k}")
        if self.lm is not None:
            tokens = self.lm.predicts_tokens
            if tokens and k != 1:
                raise ValueError(
                    f"lm.head.kind {self.lm.head.kind} predicts single tokens: patch_size must be 1, not {k}"
                )
            if tokens and self.lm.input_mode != "discrete":
                raise ValueError(
                    f"lm.head.kind {self.lm.head.kind} reads tokens: lm.input_mode must be discrete"
                )
            self._divides_sequence("lm.backbone.positions", self.lm.backbone.positions)
            if self.evaluation.tensor_parallel > 1:
                self.lm.for_inference(self.evaluation.tensor_parallel, "evaluation.tensor_parallel")
        if self.autoencoder is not None:
            self._divides_sequence("autoencoder.patches", self.autoencoder.patches)
        return self

    @model_validator(mode="after")
    def _latents_can_be_drawn_nearer(self) -> RunConfig:
        for key, asked in (("evaluation", self.evaluation), ("generation", self.generation)):
            if self.lm is None or asked.temperature == 1:
                continue
            head = self.lm.head
            if asked.algorithm == "noise_scale" and not head.scales_noise:
                raise ValueError(
                    f"{key}.algorithm noise_scale: lm.head.kind {head.kind} has no noise to scale; "
                    "use shrink, batch or exact"
                )
            if asked.algorithm == "shrink" and head.predicts == "tokens":
                raise ValueError(f"{key}.algorithm shrink: lm.head.kind {head.kind} draws no latents")
        return self

    def _divides_sequence(self, key: str, patches: int) -> None:
        tokens = patches * self.patch_size
        if self.prep is not None and self.prep.sequence_length % tokens:
            raise ValueError(
                f"prep.sequence_length {self.prep.sequence_length} is not a multiple of {key} × patch_size = {tokens}"
            )

    @property
    def folder(self) -> RunFolder:
        """The paths of the run's folder."""
        return RunFolder(self.workdir)

    @property
    def data_dir(self) -> Path:
        """Folder of the prepared splits (``train/``, ``autoencoder/``, ``heldout/``)."""
        return self.data or self.folder.data

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file or folder."""
        return self.tokenizer.path or self.folder.tokenizer

    def require_autoencoder(self) -> AutoencoderStage:
        """The autoencoder section; raises ConfigError where there is none."""
        if self.autoencoder is None:
            raise ConfigError(
                f"run {self.name}: there is no `autoencoder` section; extend configs/autoencoder/k4.yaml"
            )
        return self.autoencoder

    def require_lm(self) -> LMStage:
        """The language-model section; raises ConfigError where there is none."""
        if self.lm is None:
            raise ConfigError(f"run {self.name}: there is no `lm` section; extend configs/lm/calm-m.yaml")
        return self.lm

    def require_stage(self, stage: Stage) -> AutoencoderStage | LMStage:
        """The section of a training stage; raises ConfigError where there is none."""
        return self.require_autoencoder() if stage == Stage.AUTOENCODER else self.require_lm()

    def has(self, stage: Stage) -> bool:
        """Whether the run has what the stage needs: its section, or for an evaluation the language model's."""
        section = {
            Stage.PREP: self.prep,
            Stage.AUTOENCODER: self.autoencoder,
            Stage.LM: self.lm,
            Stage.EVAL: self.lm,
        }[stage]
        return section is not None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that the run has sections for, in the order of the chain."""
        return tuple(stage for stage in Stage if self.has(stage))

    @property
    def latent_size(self) -> int:
        """Latent size l of the autoencoder section (32 · K where there is none)."""
        return self.autoencoder.model.latent(self.patch_size) if self.autoencoder else 32 * self.patch_size

    @property
    def autoencoder_export(self) -> Path:
        """Folder of the frozen autoencoder the language model is trained against."""
        if self.lm is not None and self.lm.autoencoder is not None:
            return self.lm.autoencoder
        return self.folder.export


def notes(config: RunConfig, stage: Stage | None = None) -> list[str]:
    """One line for each such setting of a training stage (None: of both): its key, what it does, what to set."""
    return [line for one in TRAINED if stage in (None, one) for line in _stage_notes(config, one)]


def tokens_per_step(config: RunConfig, stage: Stage) -> int | None:
    """Tokens of one optimizer step; None where the run has no such stage."""
    if not config.has(stage):
        return None
    section = config.require_stage(stage)
    return section.sample_patches * config.patch_size * section.training.global_batch


def step_notes(before: RunConfig, after: RunConfig) -> list[str]:
    """One line for each stage whose steps have another number of tokens in ``after`` for another reason than its
    ``global_batch``."""
    lines = []
    for stage in TRAINED:
        old, new = tokens_per_step(before, stage), tokens_per_step(after, stage)
        if not old or not new or old == new:
            continue
        batch = after.require_stage(stage).training.global_batch
        if batch == before.require_stage(stage).training.global_batch:
            lines.append(
                f"{stage}.training.global_batch counts sequences: a step has {new:,} tokens instead of {old:,}"
                + (f"; {batch * old // new} keeps {old:,}" if (batch * old) % new == 0 else "")
            )
    return lines


def keep_tokens(base: RunConfig, variant: RunConfig) -> tuple[RunConfig, list[str]]:
    """``variant`` with as many tokens in a step, and so in all, as ``base``; and one line for each batch changed.

    A ``global_batch`` of its own is left alone. The micro-batch becomes the largest that still divides.

    Raises:
        ConfigError: no whole number of sequences has as many tokens.
    """
    document, lines = variant.model_dump(), []
    for stage in TRAINED:
        old, new = tokens_per_step(base, stage), tokens_per_step(variant, stage)
        if not old or not new or old == new:
            continue
        training = variant.require_stage(stage).training
        batch = base.require_stage(stage).training.global_batch
        if training.global_batch != batch:
            continue
        kept, rest = divmod(batch * old, new)
        if rest or not kept:
            raise ConfigError(
                f"{variant.name}: {old:,} tokens, a step of {stage} in {base.name}, are no whole number of its "
                f"sequences of {new // batch:,}; set {stage}.training.global_batch"
            )
        document[stage]["training"] |= {
            "global_batch": kept,
            "micro_batch": math.gcd(kept, training.micro_batch),
        }
        lines.append(
            f"{variant.name}: {stage}.training.global_batch {kept} instead of {batch} keeps {old:,} tokens a step"
        )
    return (RunConfig.model_validate(document), lines) if lines else (variant, lines)


def _stage_notes(config: RunConfig, stage: Stage) -> Iterator[str]:
    if not config.has(stage):
        return
    for line in _schedule_notes(config.require_stage(stage).training):
        yield f"{stage}.training.optimizer.schedule.{line}"
    if stage == Stage.LM:
        yield from (f"lm.head.{line}" for line in config.require_lm().head.notes())


def _schedule_notes(training: TrainingConfig) -> Iterator[str]:
    schedule, steps = training.optimizer.schedule, training.steps
    if schedule.warmup_steps >= steps:
        yield (
            f"warmup_steps: the rate warms up over {schedule.warmup_steps:,} steps, but the run has {steps:,}: it "
            f"never reaches {training.optimizer.lr}"
        )
    if schedule.kind == "wsd" and schedule.warmup_steps + schedule.decay_steps > steps:
        yield _overlap(training.optimizer, steps)
    if schedule.kind in ("constant", "cosine") and schedule.decay_steps:
        yield f"decay_steps: {schedule.decay_steps:,} is not used, kind {schedule.kind} has no such phase (wsd has)"
    if schedule.kind == "constant" and schedule.min_lr_ratio:
        yield f"min_lr_ratio: {schedule.min_lr_ratio} is not used, kind constant does not decay"
    if schedule.kind != "constant" and schedule.min_lr_ratio == 1:
        yield f"min_lr_ratio: at 1 kind {schedule.kind} does not decay"


def _overlap(optimizer: OptimizerConfig, steps: int) -> str:
    schedule = optimizer.schedule
    most = steps - schedule.warmup_steps
    advice = f"set it to at most {most:,}" if most > 0 else "shorten both"
    return (
        f"decay_steps: warm-up ({schedule.warmup_steps:,} steps) and decay ({schedule.decay_steps:,}) are longer than "
        f"the run ({steps:,}): the rate falls at the end of the warm-up instead of staying at {optimizer.lr}; {advice}"
    )
