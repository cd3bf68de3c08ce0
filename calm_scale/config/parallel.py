"""How a stage is laid out over ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from calm_scale.config.base import ConfigError, Section

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


class ParallelConfig(Section):
    """Megatron-core layout: world = tensor × pipeline × data. ``data: None`` takes what is left of the world."""

    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)
    virtual_pipeline: int = Field(default=1, gt=0)
    data: int | None = Field(default=None, gt=0)
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    head_parallelism: Literal["position", "tensor"] = "position"
    pipeline_layout: Literal["auto", "even"] | tuple[int, ...] = "auto"
    check_replicas: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline > 1 needs pipeline > 1")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor > 1")
        chunks = self.pipeline * self.virtual_pipeline
        if isinstance(self.pipeline_layout, tuple) and len(self.pipeline_layout) != chunks:
            raise ValueError(
                f"pipeline_layout lists {len(self.pipeline_layout)} stages, pipeline × virtual_pipeline is {chunks}"
            )
        if isinstance(self.pipeline_layout, tuple) and min(self.pipeline_layout) < 1:
            raise ValueError(f"pipeline_layout {list(self.pipeline_layout)} leaves a stage without a layer")
        return self

    @property
    def model_parallel(self) -> int:
        """Ranks of one model replica: tensor × pipeline."""
        return self.tensor * self.pipeline

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel size in a world; raises ConfigError when the layout does not fill the world."""
        data, rest = divmod(world_size, self.model_parallel)
        if rest or data == 0 or (self.data is not None and self.data != data):
            want = self.data or "any"
            raise ConfigError(
                f"{world_size} ranks do not make tensor {self.tensor} × pipeline {self.pipeline} × data {want}"
            )
        return data
