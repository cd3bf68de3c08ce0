"""Opening a trained language model for evaluation or generation: a verified checkpoint, whole or split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.inventory import find, verify
from calm_scale.checkpoint.layout import SHARDS
from calm_scale.config import CalmScaleError, ConfigError, RunConfig
from calm_scale.runtime.world import World
from calm_scale.stages.launch import lm_section
from calm_scale.stages.lm import frozen_autoencoder

if TYPE_CHECKING:
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
        ConfigError: the ranks do not make whole models, the model does not split so, or another tokenizer.
        NothingToResumeError: no such checkpoint.
        CalmScaleError: it is damaged, or the autoencoder is not the one it was trained against.
    """
    from calm_scale.lm.patch_model import load_patch_model

    stage = lm_section(config)
    if world.world_size % tensor:
        raise ConfigError(
            f"{world.world_size} ranks were started, and --tensor-parallel {tensor} needs a multiple of {tensor}"
        )
    entry = verify(find(config.workdir / "lm", step).path)
    if entry.state != "complete" or entry.card is None:
        raise CalmScaleError(f"{entry.path}: {entry.state}: {entry.reason}; name another step with --step")
    if tokenizer is not None:
        refuse_other_tokenizer(tokenizer, entry.card, config.tokenizer_path)
    codec = None
    if stage.head.kind != "softmax":
        codec, card = frozen_autoencoder(config, None, world.device)
        trained_with = entry.card.autoencoder_fingerprint
        if card.fingerprint != trained_with:
            raise CalmScaleError(
                f"{config.autoencoder_export}: has fingerprint {card.fingerprint}, but {entry.path.name} was "
                f"trained against {trained_with}; point lm.autoencoder at that one"
            )
    model = load_patch_model(config, entry.path / SHARDS, world, codec, tensor=tensor)
    return OpenModel(model, entry.card)


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
