"""`calm-scale ckpt export` and `import`: checkpoints to and from the published layout, a tensor at a time."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from calm_scale.checkpoint.card import Card, Counters, Identity
from calm_scale.checkpoint.judge import run_id
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import TokenizerConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.loading import placed_in
from calm_scale.config.run_folder import CONFIG_FILE, RunFolder, Stage
from calm_scale.stages.checkpoints import shards_of
from calm_scale.stages.folders import appearing_whole, make_way, store_config
from calm_scale.stages.model import refuse_other_tokenizer

if TYPE_CHECKING:
    from calm_scale.interop.language_model import PublishedLanguageModel
    from calm_scale.runtime.world import World

AUTOENCODER = "autoencoder"
"""The published autoencoder's folder inside a published language model's."""


def export_checkpoint(checkpoint: Path, out: Path) -> int:
    """Write an autoencoder as an export that ``lm.autoencoder`` can name, or a language model (with its
    autoencoder and tokenizer) in the published layout; both as safetensors, on one CPU, from any layout."""
    make_way(out, "the export")
    card, shards = shards_of(checkpoint)
    config = _run_of(card, checkpoint)
    with appearing_whole(out) as partial:
        if card.stage == "autoencoder":
            _export_autoencoder(config, card, shards, partial)
        else:
            _export_language_model(config, card, checkpoint, shards, partial, out)
    Console().print(f"exported step {card.step} to {out}", soft_wrap=True, highlight=False)
    return EXIT_OK


def _export_autoencoder(config: RunConfig, card: Card, shards: Path, out: Path) -> None:
    from calm_scale.autoencoder.export import write_export
    from calm_scale.interop.files import check_weight
    from calm_scale.training.deepspeed.state import stored_weights

    stage = config.require_autoencoder()
    weights = stored_weights(shards)
    for name, tensor in weights.items():
        check_weight(shards, name, tensor)
    write_export(
        out,
        weights,
        config=stage.model,
        objective=stage.objective,
        vocab_size=config.vocab_size,
        patch_size=config.patch_size,
        tokenizer_fingerprint=card.tokenizer_fingerprint,
        data_fingerprint=card.shards_fingerprint,
        steps=card.step,
        consumed_samples=card.counters.samples,
        consumed_tokens=card.counters.tokens,
        metrics={name: value for name, value in card.metrics.items() if name.startswith("eval/")},
    )


def _export_language_model(
    config: RunConfig, card: Card, checkpoint: Path, shards: Path, partial: Path, out: Path
) -> None:
    """Into ``partial``, which becomes ``out``: config.json names the autoencoder by its place there."""
    if config.require_lm().head.kind != "energy":
        raise ConfigError(f"{checkpoint}: the published layout knows the energy head only")
    from calm_scale.autoencoder.export import load_export
    from calm_scale.interop.autoencoder import export_autoencoder
    from calm_scale.interop.language_model import export_language_model, whole_from_checkpoint
    from calm_scale.interop.origin import Origin, export_tokenizer
    from data_prep.tokenizer import load_tokenizer

    autoencoder, exported = load_export(config.autoencoder_export)
    origin = Origin.read(config.workdir)
    ids = None if origin is None else origin.special_ids()
    if config.tokenizer_path.exists():
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
        refuse_other_tokenizer(tokenizer, card, config.tokenizer_path)
        tokens = config.require_lm().backbone.positions * config.patch_size
        found = export_tokenizer(config.tokenizer, config.tokenizer_path, partial, tokens)
        ids = ids or found
    export_autoencoder(
        autoencoder,
        exported.objective,
        partial / AUTOENCODER,
        container="safetensors",
        special_ids=ids,
        stored=None if origin is None else origin.autoencoder,
    )
    export_language_model(
        config,
        whole_from_checkpoint(shards),
        autoencoder,
        partial,
        container="safetensors",
        ae_path=str(out.resolve() / AUTOENCODER),
        special_ids=ids,
        stored=origin.language_model if origin is not None and card.step == 0 else None,
    )


def import_checkpoint(folder: Path, out: Path, autoencoder_folder: Path | None = None) -> int:
    """Read a published language model into a new run folder: configuration, autoencoder export, step 0.

    The run folder appears when all of it is written.
    """
    make_way(out, "the imported run")
    from calm_scale.interop.language_model import PublishedLanguageModel
    from calm_scale.interop.origin import Origin, Stored, check_definition, published_policy
    from calm_scale.runtime.megatron import initialize
    from calm_scale.runtime.world import init_world

    beside = folder / AUTOENCODER if (folder / AUTOENCODER).is_dir() else None
    carried = folder / "tokenizer.json"
    policy = TokenizerConfig()
    if carried.is_file():
        check_definition(carried)
        policy = published_policy(folder)
    source = autoencoder_folder or beside
    published = PublishedLanguageModel(folder, source, name=out.name, workdir=str(out), tokenizer=policy)
    published.read_through()
    world = init_world("cpu")
    initialize(published.run.require_lm().parallel, world)
    fingerprint, trouble = _tokenizer_of(published.run, carried)
    with appearing_whole(out) as partial:
        _write_run(published, fingerprint, partial, world)
        if source is not None:
            Origin(language_model=Stored.of(folder), autoencoder=Stored.of(source)).write(partial)
        if carried.is_file():
            shutil.copyfile(carried, partial / published.run.tokenizer_path.relative_to(out))
    world.close()
    document = out / CONFIG_FILE
    lines = [
        f"imported into {out}",
        f"generate: calm-scale generate {document} --prompt TEXT",
        f"score: calm-scale eval {document} --set data=DIR   (DIR holds a prepared `heldout` split)",
    ]
    if trouble:
        lines.append(f"{trouble} {published.run.tokenizer_path}")
    for line in lines:
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    return EXIT_OK


def _tokenizer_of(run: RunConfig, carried: Path) -> tuple[str, str | None]:
    """The fingerprint of the tokenizer that a published folder carries; or none, and what to tell about it."""
    from data_prep.errors import TokenizerError
    from data_prep.tokenizer import load_tokenizer

    if not carried.is_file():
        return "", "it carried no tokenizer.json: put one at"
    try:
        return load_tokenizer(run.tokenizer, carried).fingerprint, None
    except TokenizerError as error:
        return "", f"its tokenizer.json cannot be used ({error}): set tokenizer.* in the run, or replace"


def _write_run(published: PublishedLanguageModel, tokenizer: str, folder: Path, world: World) -> None:
    """The run's configuration, autoencoder export and checkpoint of step 0, into the folder that becomes its own."""
    from calm_scale.autoencoder.export import write_export
    from calm_scale.interop.language_model import write_checkpoint

    run = published.run
    section = run.require_autoencoder()
    exported = write_export(
        RunFolder(folder).export,
        dict(published.autoencoder.unique_parameters()),
        config=section.model,
        objective=section.objective,
        vocab_size=run.vocab_size,
        patch_size=run.patch_size,
    )
    store_config(run, folder)
    name = run_id(folder / "lm", run.name)
    identity = Identity.of_run(
        run,
        "lm",
        run_id=name,
        attempt=0,
        topology={"world_size": 1, "tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "data": 1},
        tokenizer_fingerprint=tokenizer,
        shards_fingerprint="",
        autoencoder_fingerprint=exported.fingerprint,
    )
    card = Card.of(identity, created=time.time(), counters=Counters())
    store = CheckpointStore(
        RunFolder(folder).stage(Stage.LM).checkpoints, world, run.require_lm().training.checkpoint, name
    )
    store.save(0, lambda shards: write_checkpoint(published, shards), card)


def _run_of(card: Card, checkpoint: Path) -> RunConfig:
    """The run of a card, in the folder the checkpoint lies in now."""
    here = placed_in(checkpoint.resolve().parents[2], card.config)
    return card.model_copy(update={"config": here}).described(RunConfig, folder=checkpoint)
