"""What the two training stages share: data, identity, checkpoints, telemetry and the loop, wired once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from calm_scale.accounting import hardware, saves
from calm_scale.checkpoint.card import Identity
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import RunConfig
from calm_scale.config.run import notes
from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.departure import Departure
from calm_scale.runtime.signals import StopSignals
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.world import World
from calm_scale.stages.launch import Stage
from calm_scale.stages.run_folder import store_config
from calm_scale.stages.splits import as_prepared
from calm_scale.training.attempt import device_name, open_attempt
from calm_scale.training.batches import BatchPlan, EvaluationBatches, TrainingBatches
from calm_scale.training.claim import claimed
from calm_scale.training.engine import Engine
from calm_scale.training.loop import Outcome, TrainingData, fit
from data_prep.shards.reading import ShardDataset
from launchers import environment


def training_data(
    training: TrainingConfig, engine: Engine, train: ShardDataset, heldout: ShardDataset | None, seed: int
) -> TrainingData:
    """This rank's stream of training batches and the fixed evaluation batches."""
    plan = BatchPlan.of(training, engine.data_rank, engine.data_size)
    batches = TrainingBatches(train, train.order(seed), plan, training.end_of_data, training.loader_workers)
    evaluation = EvaluationBatches(heldout, plan, training.eval_samples) if heldout is not None else None
    stored = max(1, train.manifest.tokens.stored)
    return TrainingData(batches, evaluation, train.manifest.served_padding / stored)


def run_loop(
    config: RunConfig,
    stage: Stage,
    world: World,
    engine: Engine,
    train: ShardDataset,
    heldout: ShardDataset | None,
    *,
    topology: dict[str, Any],
    autoencoder_fingerprint: str | None,
    accept: Sequence[str],
    resume_step: int | None,
    stop: StopSignals,
    departure: Departure,
    on_begin: Callable[[], object] = lambda: None,
) -> Outcome:
    """Resume or start, train to the end or to a stop signal. Every rank calls it.

    ``on_begin``: called on the first rank once it is settled that there is something to train.
    """
    folder = config.workdir / stage
    config = as_prepared(config, train.manifest)
    config, interval = _with_save_interval(config, stage, world)
    training = saves.training_of(config, stage)
    with claimed(folder, world):
        attempt = open_attempt(folder, config.name, world)
        identity = Identity.of_run(
            config,
            stage,
            run_id=attempt.run_id,
            attempt=attempt.number,
            topology=topology,
            tokenizer_fingerprint=train.manifest.tokenizer_fingerprint,
            shards_fingerprint=train.fingerprint,
            autoencoder_fingerprint=autoencoder_fingerprint,
        )
        telemetry = Telemetry(
            folder, config.logging, world, stage, attempt.run_id, attempt.number, identity.config
        )
        for note in notes(config, stage):
            telemetry.warn(note)
        telemetry.say(f"saves {interval}")
        store = CheckpointStore(
            folder / "checkpoints", world, training.checkpoint, run_id=attempt.run_id, say=telemetry.say
        )
        return fit(
            engine,
            training_data(training, engine, train, heldout, config.seed),
            training,
            store,
            telemetry,
            world,
            identity=identity,
            attempt=attempt,
            stop=stop,
            accept=accept,
            resume_step=resume_step,
            on_resumed=lambda: (store_config(config), on_begin()),
            departure=departure,
        )


def _with_save_interval(config: RunConfig, stage: Stage, world: World) -> tuple[RunConfig, str]:
    """The run with the number that `checkpoint.interval: auto` stands for here, and the words for it."""
    chip = hardware.by_name(world.broadcast_object(device_name(world)))
    ranks, nodes = world.world_size, environment.facts().num_nodes
    text = saves.interval_text(config, stage, ranks=ranks, nodes=nodes, chip=chip)
    return saves.with_interval(config, stage, ranks=ranks, nodes=nodes, chip=chip), text
