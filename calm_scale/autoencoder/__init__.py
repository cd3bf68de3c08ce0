"""Floor 3: the patch autoencoder. Here, without torch: the identity card of an exported one."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from calm_scale.config import RunConfig
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.config.errors import ConfigError
from calm_scale.config.files import checked, read_object
from calm_scale.config.section import Section

CARD_FILE = "card.json"
FORMAT_VERSION = 1
EXPORT_AGAIN = "export one again: calm-scale ckpt export RUN/autoencoder/checkpoints/step_XXXXXXXX --out DIR"


class ExportError(ConfigError):
    """An autoencoder export that is missing, damaged, or does not fit its card."""


class ExportCard(Section):
    """What an exported autoencoder is and where it comes from."""

    format_version: int = FORMAT_VERSION
    fingerprint: str
    vocab_size: int
    patch_size: int
    latent_size: int
    model: AutoencoderModelConfig
    objective: ObjectiveConfig
    tokenizer_fingerprint: str | None = None
    data_fingerprint: str | None = None
    steps: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)

    def misfits(self, config: RunConfig, tokenizer_fingerprint: str | None) -> list[str]:
        """Why a language model of ``config`` cannot be trained against it.

        Args:
            tokenizer_fingerprint: of the model's data; None where they are not seen.
        """
        facts: list[tuple[str, object, object]] = [
            ("patch_size", self.patch_size, config.patch_size),
            ("vocab_size", self.vocab_size, config.vocab_size),
            ("latent_size", self.latent_size, config.latent_size),
        ]
        if tokenizer_fingerprint is not None and self.tokenizer_fingerprint is not None:
            facts.append(("tokenizer", self.tokenizer_fingerprint, tokenizer_fingerprint))
        return [f"{name} is {theirs}, the run has {ours}" for name, theirs, ours in facts if theirs != ours]


def read_card(directory: Path) -> ExportCard:
    """The card of an export.

    Raises:
        ExportError: there is none, or it cannot be read.
    """
    path = directory / CARD_FILE
    if not path.exists():
        raise ExportError(
            f"{directory} holds no exported autoencoder ({CARD_FILE} is missing): run `calm-scale train-ae` to its end "
            f"first, set lm.autoencoder to an export, or {EXPORT_AGAIN}"
        )
    raw = read_object(path, remedy=EXPORT_AGAIN, raises=ExportError)
    if (version := raw.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise ExportError(f"{path} has format version {version}, this release reads {FORMAT_VERSION}")
    return checked(ExportCard, raw, path, remedy=EXPORT_AGAIN, raises=ExportError)
