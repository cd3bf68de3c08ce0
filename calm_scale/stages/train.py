"""The two training stages: data, engine, identity, checkpoints and telemetry wired to the loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from calm_scale.accounting import hardware, saves
from calm_scale.checkpoint.card import Identity
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.run import notes
from calm_scale.config.run_folder import Stage, StageFolder
from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.departure import Departure, joined
from calm_scale.runtime.determinism import set_deterministic
from calm_scale.runtime.finite import finite_floats
from calm_scale.runtime.late_files import files_under, see_alike
from calm_scale.runtime.signals import StopSignals
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.world import World
from calm_scale.stages.run_folder import store_config
from calm_scale.stages.splits import as_prepared, open_data
from calm_scale.training.attempt import claimed, device_name, open_attempt
from calm_scale.training.batches import BatchPlan, EvaluationBatches, TrainingBatches
from calm_scale.training.engine import Engine
from calm_scale.training.loop import Outcome, TrainingData, fit
from data_prep.shards.reading import ShardDataset
from launchers import environment

if TYPE_CHECKING:
    from calm_scale.autoencoder import ExportCard
    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.training.deepspeed.engine import DeepSpeedEngine


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
    folder = config.folder.stage(stage).path
    config = as_prepared(config, train.manifest)
    config, interval = _with_save_interval(config, stage, world)
    training = config.require_stage(stage).training
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
            StageFolder(folder).checkpoints,
            world,
            training.checkpoint,
            run_id=attempt.run_id,
            say=telemetry.say,
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


def train_lm(config: RunConfig, accept: Sequence[str] = (), resume_step: int | None = None) -> int:
    """Train (or go on training) the language model. Every rank runs this; returns the exit code.

    ``accept``, ``resume_step``: see ``fit``.
    """
    stop = StopSignals().install()
    stage = config.require_lm()
    tokens_per_sample = stage.backbone.positions * config.patch_size
    folder, limit = config.folder.stage(Stage.LM).path, stage.training.stall_seconds
    set_deterministic(config.deterministic)
    with joined("lm", folder, limit, config.device, config.join_minutes * 60) as departure:
        world = departure.world
        beat = departure.watchdog.beat
        train, heldout = open_data(config, "train", tokens_per_sample, world, beat)
        from calm_scale.training.megatron.engine import MegatronEngine

        codec, fingerprint = None, None
        if stage.head.kind != "softmax":
            codec, card = frozen_autoencoder(config, train, world)
            fingerprint = card.fingerprint
        pad_id = train.manifest.pad_id if train.manifest.served_padding else None
        engine = MegatronEngine(config, world, codec, pad_id)
        parallel = stage.parallel
        outcome = run_loop(
            config,
            Stage.LM,
            world,
            engine,
            train,
            heldout,
            topology={
                "world_size": world.world_size,
                "tensor": parallel.tensor,
                "pipeline": parallel.pipeline,
                "virtual_pipeline": parallel.virtual_pipeline,
                "data": engine.data_size,
                "sequence_parallel": parallel.sequence_parallel,
                "distributed_optimizer": parallel.distributed_optimizer,
            },
            autoencoder_fingerprint=fingerprint,
            accept=accept,
            resume_step=resume_step,
            stop=stop,
            departure=departure,
        )
        departure.exit_code = outcome.exit_code
        return outcome.exit_code


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


def train_autoencoder(config: RunConfig, accept: Sequence[str] = (), resume_step: int | None = None) -> int:
    """Train (or go on training) the autoencoder and export it. Every rank runs this; returns the exit code.

    ``accept``, ``resume_step``: see ``fit``.
    """
    stop = StopSignals().install()
    stage = config.require_autoencoder()
    tokens_per_sample = stage.patches * config.patch_size
    set_deterministic(config.deterministic)
    folder, limit = config.folder.stage(Stage.AUTOENCODER).path, stage.training.stall_seconds
    with joined("autoencoder", folder, limit, config.device, config.join_minutes * 60) as departure:
        world = departure.world
        beat = departure.watchdog.beat
        train, heldout = open_data(config, stage.split, tokens_per_sample, world, beat)
        from calm_scale.training.deepspeed.engine import DeepSpeedEngine

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
            Stage.AUTOENCODER,
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
    config: RunConfig, engine: DeepSpeedEngine, world: World, outcome: Outcome, train: ShardDataset
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
            tokenizer_fingerprint=train.manifest.tokenizer_fingerprint,
            data_fingerprint=train.fingerprint,
            steps=outcome.step,
            consumed_samples=samples,
            consumed_tokens=samples * train.tokens_per_sample,
            metrics={k: v for k, v in finite_floats(outcome.last_row).items() if k.startswith("eval/")},
        )
    world.barrier()
