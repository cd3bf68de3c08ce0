"""The language-model stage: CALM or the autoregressive baseline on Megatron-core, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm_scale.config import ConfigError, RunConfig
from calm_scale.runtime.departure import joined
from calm_scale.runtime.determinism import set_deterministic
from calm_scale.runtime.late_files import files_under, see_alike
from calm_scale.runtime.signals import StopSignals
from calm_scale.stages.launch import lm_section
from calm_scale.stages.readiness import open_data
from calm_scale.stages.training import run_loop
from data_prep.shards.reading import ShardDataset

if TYPE_CHECKING:
    from calm_scale.autoencoder.card import ExportCard
    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.runtime.world import World


def train_lm(config: RunConfig, accept: Sequence[str] = (), resume_step: int | None = None) -> int:
    """Train (or go on training) the language model. Every rank runs this; returns the exit code.

    ``accept``, ``resume_step``: see ``fit``.
    """
    stop = StopSignals().install()
    stage = lm_section(config)
    tokens_per_sample = stage.backbone.positions * config.patch_size
    folder, limit = config.workdir / "lm", stage.training.stall_seconds
    set_deterministic(config.deterministic)
    with joined("lm", folder, limit, config.device, config.join_minutes * 60) as departure:
        world = departure.world
        beat = departure.watchdog.beat
        train, heldout = open_data(config, "train", tokens_per_sample, world, beat)
        from calm_scale.training.megatron_engine import MegatronEngine

        codec, fingerprint = None, None
        if stage.head.kind != "softmax":
            codec, card = frozen_autoencoder(config, train, world)
            fingerprint = card.fingerprint
        pad_id = train.manifest.pad_id if train.manifest.served_padding else None
        engine = MegatronEngine(config, world, codec, pad_id)
        parallel = stage.parallel
        outcome = run_loop(
            config,
            "lm",
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
    from calm_scale.autoencoder.card import read_card
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
