"""What the one training loop needs to know; the same section for both stages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from calm_scale.config.base import ConfigError, Section
from calm_scale.config.checkpoint import CheckpointConfig
from calm_scale.config.optimizer import OptimizerConfig


class TrainingConfig(Section):
    """Batches are counted in sequences (samples). global_batch = micro_batch × DP × accumulation.

    ``max_nonfinite_steps`` skipped in a row end the run. ``loader_workers`` threads read batches ahead (0: none).
    """

    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(default=1, gt=0)
    precision: Literal["fp32", "bf16"] = "bf16"
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval_interval: int = Field(default=1000, gt=0)
    eval_samples: int = Field(default=64, gt=0)
    on_nonfinite: Literal["skip", "stop"] = "skip"
    max_nonfinite_steps: int = Field(default=10, ge=1)
    end_of_data: Literal["repeat", "stop"] = "repeat"
    loader_workers: int = Field(default=1, ge=0, le=32)
    stall_seconds: float = Field(default=1800.0, gt=0)

    @model_validator(mode="after")
    def _divides(self) -> TrainingConfig:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}"
            )
        return self

    def accumulation(self, data_parallel: int) -> int:
        """Micro-batches per rank and step: global_batch / (micro_batch · DP).

        Raises:
            ConfigError: the three do not divide; names the nearest global batches that do.
        """
        per_pass = self.micro_batch * data_parallel
        if self.global_batch % per_pass:
            low = self.global_batch // per_pass * per_pass
            raise ConfigError(
                f"global_batch {self.global_batch} ≠ micro_batch {self.micro_batch} × data-parallel "
                f"{data_parallel} × accumulation; the nearest that fit are "
                + (f"{low} and {low + per_pass}" if low else f"{per_pass}")
            )
        return self.global_batch // per_pass
