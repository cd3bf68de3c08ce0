"""The autoencoder stage: train under DeepSpeed ZeRO, then export the frozen model for the language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm_scale.config import RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.runtime.departure import joined
from calm_scale.runtime.determinism import set_deterministic
from calm_scale.runtime.finite import finite_floats
from calm_scale.runtime.signals import StopSignals
from calm_scale.runtime.world import World
from calm_scale.stages.launch import autoencoder_section
from calm_scale.stages.readiness import open_data
from calm_scale.stages.training import run_loop
from calm_scale.training.loop import Outcome
from data_prep.shards.reading import ShardDataset

if TYPE_CHECKING:
    from calm_scale.training.deepspeed_engine import DeepSpeedEngine


def train_autoencoder(config: RunConfig, accept: Sequence[str] = (), resume_step: int | None = None) -> int:
    """Train (or go on training) the autoencoder and export it. Every rank runs this; returns the exit code.

    ``accept``, ``resume_step``: see ``fit``.
    """
    stop = StopSignals().install()
    stage = autoencoder_section(config)
    tokens_per_sample = stage.patches * config.patch_size
    set_deterministic(config.deterministic)
    folder, limit = config.workdir / "autoencoder", stage.training.stall_seconds
    with joined("autoencoder", folder, limit, config.device, config.join_minutes * 60) as departure:
        world = departure.world
        beat = departure.watchdog.beat
        train, heldout = open_data(config, stage.split, tokens_per_sample, world, beat)
        from calm_scale.training.deepspeed_engine import DeepSpeedEngine

        engine = DeepSpeedEngine(
            stage,
            vocab_size=config.vocab_size,
            patch_size=config.patch_size,
            seed=config.seed,
            world=world,
            pad_id=train.manifest.pad_id,
        )
        outcome = run_loop(
            config,
            "autoencoder",
            world,
            engine,
            train,
            heldout,
            topology={"world_size": world.world_size, "zero_stage": stage.zero.stage},
            autoencoder_fingerprint=None,
            accept=accept,
            resume_step=resume_step,
            stop=stop,
            departure=departure,
            on_begin=lambda: _store_deepspeed_config(config, engine),
        )
        if world.is_first:
            _draw_latents(config, engine)
        if outcome.exit_code == EXIT_OK and not world.broadcast_object(_is_exported(config, outcome)):
            _export(config, engine, world, outcome, train)
        departure.exit_code = outcome.exit_code
        return outcome.exit_code


def _store_deepspeed_config(config: RunConfig, engine: DeepSpeedEngine) -> None:
    """The DeepSpeed JSON in use, printed and beside the checkpoints: `autoencoder/deepspeed.json`."""
    path = config.workdir / "autoencoder" / "deepspeed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(engine.config, indent=2) + "\n", encoding="utf-8")
    print(
        f"[autoencoder] DeepSpeed runs with {path}: {json.dumps(engine.config)}", file=sys.stderr, flush=True
    )


def _draw_latents(config: RunConfig, engine: DeepSpeedEngine) -> None:
    """The latest evaluation of this attempt as `autoencoder/latents.png`: the noise curve, σ and KL per dimension."""
    from calm_scale.autoencoder.plots import draw_report

    if engine.last_report is not None:
        draw_report(engine.last_report, config.workdir / "autoencoder" / "latents.png")


def _is_exported(config: RunConfig, outcome: Outcome) -> bool:
    """A run that was complete before has its export already, unless it was stopped in between."""
    from calm_scale.autoencoder.card import ExportError, read_card

    if outcome.resumed_at != outcome.step:
        return False
    try:
        return read_card(config.workdir / "autoencoder" / "export").steps == outcome.step
    except ExportError:
        return False


def _export(
    config: RunConfig, engine: DeepSpeedEngine, world: World, outcome: Outcome, train: ShardDataset
) -> None:
    from calm_scale.autoencoder.export import write_export

    stage = autoencoder_section(config)
    weights = engine.weights()
    if world.is_first:
        samples = outcome.step * stage.training.global_batch
        write_export(
            config.workdir / "autoencoder" / "export",
            weights,
            config=stage.model,
            objective=stage.objective,
            vocab_size=config.vocab_size,
            patch_size=config.patch_size,
            tokenizer_fingerprint=train.manifest.tokenizer_fingerprint,
            data_fingerprint=train.fingerprint,
            steps=outcome.step,
            consumed_samples=samples,
            consumed_tokens=samples * train.tokens_per_sample,
            metrics={k: v for k, v in finite_floats(outcome.last_row).items() if k.startswith("eval/")},
        )
    world.barrier()
