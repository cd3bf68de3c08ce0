"""Training a stage: its data, its engine, its checkpoints and its record, wired to the loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from calm_scale.accounting import hardware, saves
from calm_scale.accounting.step_time import slower_without_transformer_engine
from calm_scale.checkpoint.card import Identity
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.run import notes
from calm_scale.config.run_folder import Stage
from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.departure import StopSignals, joined
from calm_scale.runtime.finite import finite_floats
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.torch_settings import set_deterministic
from calm_scale.runtime.world import World
from calm_scale.stages.folders import store_config
from calm_scale.stages.splits import as_prepared, open_data
from calm_scale.training.attempt import (
    Outcome,
    Start,
    Training,
    TrainingData,
    claimed,
    device_name,
    open_attempt,
)
from calm_scale.training.batches import BatchPlan, EvaluationBatches, TrainingBatches
from calm_scale.training.engine import Engine
from calm_scale.training.loop import fit
from data_prep.shards.reading import ShardDataset
from launchers import environment
from launchers.ranks import files_under, see_alike

if TYPE_CHECKING:
    import torch

    from calm_scale.autoencoder import ExportCard
    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.training.deepspeed.engine import DeepSpeedEngine


@dataclass(frozen=True)
class StageModel:
    """What a stage trains, and what belongs to this stage alone.

    Attributes:
        topology: the layout that writes the checkpoints, for their cards.
        on_begin: called on the first rank before the first step, unless the run is complete or refused.
        finish: called on every rank after the training.
    """

    engine: Engine
    topology: dict[str, Any]
    autoencoder_fingerprint: str | None = None
    on_begin: Callable[[], object] = lambda: None
    finish: Callable[[Outcome], object] = lambda outcome: None


def train(config: RunConfig, stage: Stage, accept: Sequence[str] = (), resume_step: int | None = None) -> int:
    """Train a stage, from its newest checkpoint if it has one. Every rank runs this; returns the exit code.

    ``accept``, ``resume_step``: see ``Start``.
    """
    stop = StopSignals().install()
    limit = config.require_stage(stage).training.stall_seconds
    folder = config.folder.stage(stage).path
    set_deterministic(config.deterministic)
    with joined(stage.value, folder, limit, config.device, config.join_minutes * 60) as departure:
        world = departure.world
        data, heldout = open_data(config, stage, world, departure.watchdog.beat)
        model = (_language_model if stage == Stage.LM else _autoencoder)(config, data, world)
        run, interval = _with_save_interval(as_prepared(config, data.manifest), stage, world)
        with claimed(folder, world):
            training = _training(run, stage, model, data, heldout, world)
            training.telemetry.say(f"saves {interval}")

            def begin() -> None:
                store_config(run)
                model.on_begin()

            outcome = fit(training, Start(accept, resume_step), stop, departure, begin)
        model.finish(outcome)
        departure.exit_code = outcome.exit_code
        return outcome.exit_code


def _with_save_interval(config: RunConfig, stage: Stage, world: World) -> tuple[RunConfig, str]:
    """The run with `checkpoint.interval: auto` resolved for this machine, and the interval in words."""
    chip = hardware.by_name(world.broadcast_object(device_name(world)))
    ranks, nodes = world.world_size, environment.facts().num_nodes
    text = saves.interval_text(config, stage, ranks=ranks, nodes=nodes, chip=chip)
    return saves.with_interval(config, stage, ranks=ranks, nodes=nodes, chip=chip), text


def _training(
    config: RunConfig,
    stage: Stage,
    model: StageModel,
    data: ShardDataset,
    heldout: ShardDataset | None,
    world: World,
) -> Training:
    """This attempt, with everything that the loop needs of the run."""
    settings, folder = config.require_stage(stage).training, config.folder.stage(stage)
    attempt = open_attempt(folder.path, config.name, world)
    identity = Identity.of_run(
        config,
        stage,
        run_id=attempt.run_id,
        attempt=attempt.number,
        topology=model.topology,
        tokenizer_fingerprint=data.manifest.tokenizer_fingerprint,
        shards_fingerprint=data.fingerprint,
        autoencoder_fingerprint=model.autoencoder_fingerprint,
    )
    telemetry = Telemetry(
        folder.path, config.logging, world, stage, attempt.run_id, attempt.number, identity.config
    )
    for note in (*notes(config, stage), *_missing_kernels(config, stage, model.engine, world)):
        telemetry.warn(note)
    store = CheckpointStore(
        folder.checkpoints, world, settings.checkpoint, run_id=attempt.run_id, say=telemetry.say
    )
    batches = _training_data(settings, model.engine, data, heldout, config.seed, world.device)
    return Training(model.engine, batches, settings, store, telemetry, world, identity, attempt)


def _missing_kernels(config: RunConfig, stage: Stage, engine: Engine, world: World) -> list[str]:
    """Which fast kernels a language model's training on GPUs goes without, and what that costs."""
    from calm_scale.runtime import fast_kernels

    if world.device.type != "cuda" or stage != Stage.LM:
        return []
    chip = hardware.by_name(device_name(world))
    slower = None
    if chip is not None:
        slower = slower_without_transformer_engine(config, engine.data_size, chip, world.local_world_size)
    return fast_kernels.missing(fast_kernels.found(), slower)


def _training_data(
    settings: TrainingConfig,
    engine: Engine,
    data: ShardDataset,
    heldout: ShardDataset | None,
    seed: int,
    device: torch.device,
) -> TrainingData:
    """This rank's stream of training batches and the fixed evaluation batches."""
    plan = BatchPlan.of(settings, engine.data_rank, engine.data_size)
    batches = TrainingBatches(
        data, data.order(seed), plan, settings.end_of_data, settings.loader_workers, device
    )
    evaluation = None
    if heldout is not None:
        evaluation = EvaluationBatches(heldout, plan, settings.eval_samples, device)
    stored = max(1, data.manifest.tokens.stored)
    return TrainingData(batches, evaluation, data.manifest.served_padding / stored)


def _language_model(config: RunConfig, data: ShardDataset, world: World) -> StageModel:
    """CALM or the autoregressive baseline on Megatron-core, in any layout."""
    from calm_scale.training.megatron.engine import MegatronEngine

    stage = config.require_lm()
    codec, fingerprint = None, None
    if not stage.predicts_tokens:
        codec, card = frozen_autoencoder(config, data, world)
        fingerprint = card.fingerprint
    pad_id = data.manifest.pad_id if data.manifest.served_padding else None
    engine = MegatronEngine(config, world, codec, pad_id)
    parallel = stage.parallel
    topology = {
        "world_size": world.world_size,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "virtual_pipeline": parallel.virtual_pipeline,
        "data": engine.data_size,
        "sequence_parallel": parallel.sequence_parallel,
        "distributed_optimizer": parallel.distributed_optimizer,
    }
    return StageModel(engine, topology, fingerprint)


def frozen_autoencoder(
    config: RunConfig, data: ShardDataset | None, world: World
) -> tuple[Autoencoder, ExportCard]:
    """The exported autoencoder of the run, refused when it was made for other patches or another tokenizer. Collective.

    Raises:
        ConfigError: K, V, l or the tokenizer differ from the run's.
    """
    from calm_scale.autoencoder import read_card
    from calm_scale.autoencoder.export import load_export

    folder = config.autoencoder_export

    def refuse_misfits() -> None:
        wrong = read_card(folder).misfits(
            config, data.manifest.tokenizer_fingerprint if data is not None else None
        )
        if wrong:
            raise ConfigError(f"{folder}: this autoencoder does not fit the run: " + "; ".join(wrong))

    see_alike(world, folder, lambda: files_under(folder))
    world.on_first(refuse_misfits)
    loaded: list[tuple[Autoencoder, ExportCard]] = []
    world.everywhere(lambda: loaded.append(load_export(folder, device=world.device)))
    return loaded[0]


def _autoencoder(config: RunConfig, data: ShardDataset, world: World) -> StageModel:
    """The patch autoencoder under DeepSpeed ZeRO; it is exported at the end."""
    from calm_scale.training.deepspeed.engine import DeepSpeedEngine

    stage = config.require_autoencoder()
    engine = DeepSpeedEngine(
        stage,
        vocab_size=config.vocab_size,
        patch_size=config.patch_size,
        seed=config.seed,
        world=world,
        pad_id=data.manifest.pad_id,
    )
    return StageModel(
        engine,
        topology={"world_size": world.world_size, "zero_stage": stage.zero.stage},
        on_begin=partial(_store_deepspeed_config, config, engine),
        finish=partial(_export_if_finished, config, engine, world, data),
    )


def _store_deepspeed_config(config: RunConfig, engine: DeepSpeedEngine) -> None:
    """The DeepSpeed JSON in use, printed and beside the checkpoints: `autoencoder/deepspeed.json`."""
    path = config.folder.stage(Stage.AUTOENCODER).path / "deepspeed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(engine.config, indent=2) + "\n", encoding="utf-8")
    print(
        f"[autoencoder] DeepSpeed runs with {path}: {json.dumps(engine.config)}", file=sys.stderr, flush=True
    )


def _draw_latents(config: RunConfig, engine: DeepSpeedEngine) -> None:
    """The latest evaluation of this attempt as `autoencoder/latents.png`: the noise curve, σ and KL per dimension."""
    from calm_scale.autoencoder.metrics import draw_report

    if engine.last_report is not None:
        draw_report(engine.last_report, config.folder.stage(Stage.AUTOENCODER).path / "latents.png")


def _export_if_finished(
    config: RunConfig, engine: DeepSpeedEngine, world: World, data: ShardDataset, outcome: Outcome
) -> None:
    """The picture of the latest evaluation, and after the last step the frozen autoencoder."""
    if world.is_first:
        _draw_latents(config, engine)
    if outcome.exit_code == EXIT_OK and not world.broadcast_object(_is_exported(config, outcome)):
        _export(config, engine, world, outcome, data)


def _is_exported(config: RunConfig, outcome: Outcome) -> bool:
    """A run that was complete before has its export already, unless it was stopped in between."""
    from calm_scale.autoencoder import ExportError, read_card

    if outcome.resumed_at != outcome.step:
        return False
    try:
        return read_card(config.folder.export).steps == outcome.step
    except ExportError:
        return False


def _export(
    config: RunConfig, engine: DeepSpeedEngine, world: World, outcome: Outcome, data: ShardDataset
) -> None:
    from calm_scale.autoencoder.export import write_export

    stage = config.require_autoencoder()
    weights = engine.weights()
    if world.is_first:
        samples = outcome.step * stage.training.global_batch
        write_export(
            config.folder.export,
            weights,
            config=stage.model,
            objective=stage.objective,
            vocab_size=config.vocab_size,
            patch_size=config.patch_size,
            tokenizer_fingerprint=data.manifest.tokenizer_fingerprint,
            data_fingerprint=data.fingerprint,
            steps=outcome.step,
            consumed_samples=samples,
            consumed_tokens=samples * data.tokens_per_sample,
            metrics={k: v for k, v in finite_floats(outcome.last_row).items() if k.startswith("eval/")},
        )
    world.barrier()
