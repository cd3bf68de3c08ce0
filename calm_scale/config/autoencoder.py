"""The autoencoder: architecture, objective, training (paper §2), laid out by DeepSpeed ZeRO."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from calm_scale.config.section import Section
from calm_scale.config.training import TrainingConfig

_OWNED_BY_TRAINING = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.global_batch and training.micro_batch",
    "gradient_clipping": "training.optimizer.clip_norm",
    "optimizer": "training.optimizer and zero.optimizer",
    "scheduler": "training.optimizer.schedule",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "torch_autocast": "training.precision",
    "zero_optimization.stage": "zero.stage",
}
"""DeepSpeed keys that other settings decide, and where to set them instead."""


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


class ZeroConfig(Section):
    """DeepSpeed ZeRO for the autoencoder. ``data`` is the number of ranks; None takes what the launcher gives.

    ``offload: cpu`` keeps the optimizer state in host memory. ``optimizer`` chooses the AdamW implementation:
    ``torch`` (fused kernels, nothing to compile), ``cpu_adam`` (DeepSpeed's vectorised one, compiled on first
    use), or ``auto``: ``cpu_adam`` when offloading from a GPU where it builds, else ``torch``. ``overrides`` is
    merged into the DeepSpeed configuration.
    """

    stage: Literal[0, 1, 2, 3] = 1
    data: int | None = Field(default=None, gt=0)
    offload: Literal["none", "cpu"] = "none"
    optimizer: Literal["auto", "torch", "cpu_adam"] = "auto"
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _overrides_leave_the_contract(self) -> ZeroConfig:
        for key, instead in _OWNED_BY_TRAINING.items():
            section: Any = self.overrides
            for part in key.split("."):
                section = section.get(part) if isinstance(section, dict) else None
            if section is not None:
                raise ValueError(f"overrides.{key} is decided by {instead}; set that instead")
        if self.offload == "cpu" and self.stage == 0:
            raise ValueError("offload: cpu needs ZeRO stage 1, 2 or 3; stage 0 partitions nothing")
        if self.optimizer == "cpu_adam" and self.stage == 0:
            raise ValueError("optimizer: cpu_adam needs ZeRO stage 1, 2 or 3; stage 0 has torch's AdamW")
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

    @property
    def sample_patches(self) -> int:
        """Patches of one training sample."""
        return self.patches
