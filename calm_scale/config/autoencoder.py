"""The autoencoder: architecture, objective, training (paper §2), laid out by DeepSpeed ZeRO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from calm_scale.config.section import FORBIDDEN, RESULTS, SAFE, Section
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
    """Widths of the encoder and its mirror, the decoder."""

    field_policy = FORBIDDEN

    latent_size: int | None = Field(default=None, gt=0)
    """Numbers of a patch's latent vector; null is 32 · K."""
    hidden_size: int = Field(default=512, gt=0)
    """Width of the residual stream."""
    ffn_size: int = Field(default=1280, gt=0)
    """Width inside the feed-forward layers."""
    encoder_layers: int = Field(default=2, gt=0)
    """Feed-forward layers of the encoder; even, half before the squeeze of a patch and half after."""
    decoder_layers: int = Field(default=2, gt=0)
    """Feed-forward layers of the decoder; even."""
    norm_eps: Annotated[float, RESULTS] = Field(default=1e-6, gt=0)
    """Added to the variance in every RMSNorm."""
    init_std: Annotated[float, SAFE] = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

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
    """K · CE + kl_weight · mean over patches of Σ_j max(kl_floor, KL_j). Every row of Table 2 is a setting of this."""

    field_policy = RESULTS

    posterior: Literal["gaussian", "deterministic"] = "gaussian"
    """Sample the latent from N(μ, σ²), or train z = μ by reconstruction only."""
    kl_weight: float = Field(default=1e-3, ge=0)
    """Weight of the KL term."""
    kl_floor: float = Field(default=0.5, ge=0)
    """Nats below which a latent dimension's KL is not pushed further."""
    token_dropout: float = Field(default=0.15, ge=0, lt=1)
    """Share of input tokens that are masked in training."""
    latent_dropout: float = Field(default=0.15, ge=0, lt=1)
    """Share of latent numbers that are zeroed in training; the others are scaled by 1 / (1 − share)."""
    masked_token: Literal["id_zero", "zero_embedding"] = "id_zero"
    """What a masked token becomes: id 0, as in the reference, or a zero embedding."""

    @model_validator(mode="after")
    def _kl_needs_a_distribution(self) -> ObjectiveConfig:
        if self.posterior == "deterministic" and self.kl_weight > 0:
            raise ValueError(
                f"posterior: deterministic has no KL term, but kl_weight is {self.kl_weight}; set kl_weight: 0"
            )
        return self


class ZeroConfig(Section):
    """DeepSpeed ZeRO for the autoencoder."""

    field_policy = SAFE

    stage: Literal[0, 1, 2, 3] = 1
    """What is partitioned over the ranks: nothing, optimizer state, and gradients, and parameters."""
    data: int | None = Field(default=None, gt=0)
    """Number of ranks; null takes what the launcher gives."""
    offload: Literal["none", "cpu"] = "none"
    """Where the optimizer state is kept: on the device or in host memory."""
    optimizer: Literal["auto", "torch", "cpu_adam"] = "auto"
    """AdamW of torch or DeepSpeed's for CPUs; `auto` takes that when offloading from a GPU, if it can be built."""
    overrides: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Merged into the DeepSpeed configuration."""

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
    """Everything the autoencoder job needs."""

    patches: Annotated[int, RESULTS] = Field(default=2048, gt=0)
    """Patches of one training sample, of K tokens each."""
    model: AutoencoderModelConfig = AutoencoderModelConfig()
    """Widths of the encoder and the decoder."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    training: TrainingConfig
    """Steps, batch, optimizer and checkpoints."""
    zero: ZeroConfig = ZeroConfig()
    """DeepSpeed ZeRO over the ranks."""
    split: Annotated[Literal["train", "autoencoder"], SAFE] = "train"
    """The prepared split to train on."""
    evaluation_noise: Annotated[tuple[float, ...], SAFE] = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
    """Standard deviations of the extra latent noise in the accuracy curve."""

    @model_validator(mode="after")
    def _batch_fits(self) -> AutoencoderStage:
        if self.zero.data is not None:
            self.training.accumulation(self.zero.data)
        return self

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one replica of the model."""
        return 1

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the whole layout; None where it leaves the number of replicas open."""
        return self.zero.data

    def micro_batches(self, data_parallel: int) -> int:
        """Micro-batches per rank and step; raises ConfigError where the batch does not divide."""
        return self.training.accumulation(data_parallel)

    @property
    def sample_patches(self) -> int:
        """Patches of one training sample."""
        return self.patches
