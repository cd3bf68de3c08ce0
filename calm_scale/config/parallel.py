"""How a stage is laid out over ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from calm_scale.config.base import Section


class ZeroConfig(Section):
    """DeepSpeed ZeRO for the autoencoder. ``data`` is the number of ranks; None takes what the launcher gives."""

    stage: Literal[0, 1, 2, 3] = 1
    data: int | None = Field(default=None, gt=0)
    offload: Literal["none", "cpu"] = "none"
    overrides: dict[str, Any] = Field(default_factory=dict)


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
        return self

    @property
    def model_parallel(self) -> int:
        """Ranks of one model replica: tensor × pipeline."""
        return self.tensor * self.pipeline

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel size in a world; raises ValueError when the layout does not fill the world."""
        data, rest = divmod(world_size, self.model_parallel)
        if rest or data == 0 or (self.data is not None and self.data != data):
            want = self.data or "any"
            raise ValueError(
                f"{world_size} ranks do not make tensor {self.tensor} × pipeline {self.pipeline} × data {want}"
            )
        return data
