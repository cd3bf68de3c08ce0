"""The autoencoder: architecture, objective and training (method §1, paper §2)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from calm_scale.config.base import Section
from calm_scale.config.parallel import ZeroConfig
from calm_scale.config.training import TrainingConfig


class AutoencoderModelConfig(Section):
    """Widths of the encoder and its mirror. ``latent_size: None`` means 32 · K."""

    latent_size: int | None = Field(default=None, gt=0)
    hidden_size: int = Field(default=512, gt=0)
    ffn_size: int = Field(default=1280, gt=0)
    encoder_layers: int = Field(default=2, gt=0)
    decoder_layers: int = Field(default=2, gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _even_layers(self) -> AutoencoderModelConfig:
        for name, count in (("encoder_layers", self.encoder_layers), ("decoder_layers", self.decoder_layers)):
            if count % 2:
                raise ValueError(
                    f"{name} {count} is odd: half the layers run before the squeeze and half after it; use {count + 1}"
                )
        return self

    def latent(self, patch_size: int) -> int:
        """Latent size l for patches of K tokens (default 32 · K)."""
        return self.latent_size or 32 * patch_size


class ObjectiveConfig(Section):
    """K · CE + kl_weight · mean over patches of Σ_j max(kl_floor, KL_j). Every row of Table 2 is a setting of this.

    ``posterior: deterministic`` trains z = μ (reconstruction only). ``masked_token`` says what a dropped token
    becomes: id 0 as in the reference, or a zero embedding. Kept latents are scaled by 1 / (1 − latent_dropout).
    """

    posterior: Literal["gaussian", "deterministic"] = "gaussian"
    kl_weight: float = Field(default=1e-3, ge=0)
    kl_floor: float = Field(default=0.5, ge=0)
    token_dropout: float = Field(default=0.15, ge=0, lt=1)
    latent_dropout: float = Field(default=0.15, ge=0, lt=1)
    masked_token: Literal["id_zero", "zero_embedding"] = "id_zero"

    @model_validator(mode="after")
    def _kl_needs_a_distribution(self) -> ObjectiveConfig:
        if self.posterior == "deterministic" and self.kl_weight > 0:
            raise ValueError(
                f"posterior: deterministic has no KL term, but kl_weight is {self.kl_weight}; set kl_weight: 0"
            )
        return self


class AutoencoderStage(Section):
    """Everything the autoencoder job needs. A training sample is ``patches`` · K tokens.

    ``evaluation_noise`` lists the extra latent noise δ of the accuracy curve.
    """

    patches: int = Field(default=2048, gt=0)
    model: AutoencoderModelConfig = AutoencoderModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    training: TrainingConfig
    zero: ZeroConfig = ZeroConfig()
    split: Literal["train", "autoencoder"] = "train"
    evaluation_noise: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)

    @model_validator(mode="after")
    def _batch_fits(self) -> AutoencoderStage:
        if self.zero.data is not None:
            self.training.accumulation(self.zero.data)
        return self
