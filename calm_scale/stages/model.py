"""Opening a trained language model for evaluation or generation: a verified checkpoint, whole or split over ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.diff import resume_diff
from calm_scale.checkpoint.file_list import SHARDS
from calm_scale.checkpoint.judge import find, verify
from calm_scale.config import CalmScaleError, ConfigError, RunConfig
from calm_scale.config.data import ENCODES, TokenizerConfig
from calm_scale.config.fields import policy_of
from calm_scale.config.run_folder import Stage
from calm_scale.runtime.world import World
from calm_scale.stages.train import frozen_autoencoder
from launchers.ranks import files_under, see_alike

if TYPE_CHECKING:
    from calm_scale.autoencoder import ExportCard
    from calm_scale.lm.patch_model import MegatronPatchModel
    from data_prep.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """A model to draw from, and what it is."""

    model: MegatronPatchModel
    card: Card

    def provenance(self, data_fingerprint: str | None = None) -> dict[str, str]:
        """Names of what is scored, for a result that can be compared."""
        names = {
            "run": self.card.run_id,
            "step": str(self.card.step),
            "config": self.card.config_hash,
            "tokenizer": self.card.tokenizer_fingerprint,
        }
        if self.card.autoencoder_fingerprint is not None:
            names["autoencoder"] = self.card.autoencoder_fingerprint
        if data_fingerprint is not None:
            names["data"] = data_fingerprint
        return names


def open_model(
    config: RunConfig,
    world: World,
    step: int | None = None,
    tensor: int = 1,
    tokenizer: Tokenizer | None = None,
) -> OpenModel:
    """The newest complete checkpoint of the run (or ``step``), whatever layout wrote it.

    Args:
        tensor: consecutive ranks that hold one model, split over them.
        tokenizer: what will make and read its ids.

    Raises:
        ConfigError: the ranks do not make whole models, the model does not split so, another tokenizer, or the
            document describes another model than the checkpoint's.
        NothingToResumeError: no such checkpoint.
        CalmScaleError: it is damaged, or the autoencoder is not the one it was trained against.
    """
    from calm_scale.lm.patch_model import load_patch_model

    stage = config.require_lm()

    def look() -> tuple[Path, Card]:
        if world.world_size % tensor:
            raise ConfigError(
                f"{world.world_size} ranks were started, and --tensor-parallel {tensor} needs a multiple of {tensor}"
            )
        entry = verify(find(config.folder.stage(Stage.LM).path, step).path)
        if entry.state not in ("complete", "suspect") or entry.card is None:
            raise CalmScaleError(
                f"{entry.path}: {entry.state}: {entry.reason}; name another step with --step"
            )
        refuse_other_model(config, entry.card, entry.path)
        if tokenizer is not None:
            refuse_other_tokenizer(tokenizer, entry.card, config.tokenizer_path)
        return entry.path, entry.card

    path, card = world.on_first(look, patience=lambda: None)
    see_alike(world, path, lambda: files_under(path))
    codec = None
    if not stage.predicts_tokens:
        codec, export = frozen_autoencoder(config, None, world)
        world.on_first(lambda: _refuse_other_autoencoder(config, export, card, path))
    model = load_patch_model(config, path / SHARDS, world, codec, tensor=tensor)
    return OpenModel(model, card)


def _refuse_other_autoencoder(config: RunConfig, export: ExportCard, card: Card, path: Path) -> None:
    if export.fingerprint != card.autoencoder_fingerprint:
        raise CalmScaleError(
            f"{config.autoencoder_export}: has fingerprint {export.fingerprint}, but {path.name} was "
            f"trained against {card.autoencoder_fingerprint}; point lm.autoencoder at that one"
        )


def trained_tokenizer(config: RunConfig, world: World, step: int | None = None) -> Tokenizer:
    """The tokenizer at ``tokenizer.path`` with the encoder, special tokens and BOS/EOS policy that the checkpoint was
    trained with; where the document has others, the first rank says so. An imported model takes the document's.

    Raises:
        NothingToResumeError: no such checkpoint.
        TokenizerError: no tokenizer there.
    """
    from data_prep.tokenizer import load_tokenizer

    card = world.on_first(lambda: find(config.folder.stage(Stage.LM).path, step).card)
    stored = card.config.get("tokenizer", {}) if card is not None and card.shards_fingerprint else {}
    trained = {name: stored[name] for name in ENCODES if name in stored}
    asked = config.tokenizer.model_dump()
    for name, value in trained.items():
        if world.is_first and name != "encoder" and asked[name] != value:
            sys.stderr.write(
                f"note: tokenizer.{name} is {asked[name]!r} in the document, but the model was trained with "
                f"{value!r}, which is used\n"
            )
    wanted = TokenizerConfig.model_validate({**asked, **trained})
    loaded: list[Tokenizer] = []
    world.everywhere(lambda: loaded.append(load_tokenizer(wanted, config.tokenizer_path)))
    return loaded[0]


def refuse_other_model(config: RunConfig, card: Card, path: Path) -> None:
    """Raises ConfigError where ``config`` would build another function from the weights in ``path`` than was trained.

    A setting that the card does not know, because an earlier version wrote it, is taken from ``config``.
    """
    trained = card.model_copy(update={"config": _with_defaults(card.config)})
    changes = resume_diff(trained, _with_defaults(config.model_dump(mode="json")), "lm").changes
    wrong = [
        f"  {change.field}: trained with {change.old!r}, now {change.new!r}"
        for change in changes
        if change.old is not None and policy_of(change.field, card.config).model
    ]
    if wrong:
        lines = "\n".join(wrong)
        raise ConfigError(
            f"{path}: the configuration describes another model than the one trained there:\n{lines}\n"
            "give these settings the run's values"
        )


def _with_defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved document with the numbers that a null stands for in ``lm``: writing them out is no change."""
    section = document.get("lm")
    if not isinstance(section, dict) or not all(
        isinstance(section.get(k), dict) for k in ("backbone", "head")
    ):
        return dict(document)
    backbone, head = dict(section["backbone"]), dict(section["head"])
    backbone["num_query_groups"] = backbone.get("num_query_groups") or backbone.get("num_heads")
    if "num_blocks" in head:
        head["num_blocks"] = head.get("num_blocks") or max(1, int(backbone.get("num_layers", 0)) // 4)
    return {**document, "lm": {**section, "backbone": backbone, "head": head}}


def refuse_other_tokenizer(tokenizer: Tokenizer, card: Card, path: Path) -> None:
    """Raises ConfigError where the tokenizer at ``path`` gives other ids than the one the model was trained with.

    An imported model that came without a tokenizer knows none, and any is taken.
    """
    if card.tokenizer_fingerprint and tokenizer.fingerprint != card.tokenizer_fingerprint:
        raise ConfigError(
            f"{path}: this tokenizer has fingerprint {tokenizer.fingerprint}, but the model was trained with "
            f"{card.tokenizer_fingerprint}; point tokenizer.path at that one, with the tokenizer.* of the run"
        )


def refuse_spare_ranks(world: World, tensor: int, command: str) -> None:
    """Raises ConfigError where more ranks run than hold the one model that ``command`` uses."""
    if world.world_size != tensor:
        raise ConfigError(
            f"{command} runs on the ranks of one model: {world.world_size} were started, --tensor-parallel is "
            f"{tensor}. Start {tensor}, or split the model with --tensor-parallel {world.world_size}"
        )
