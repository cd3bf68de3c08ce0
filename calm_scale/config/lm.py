"""The language model: input compressor, backbone, head, layout and training (paper §3)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from calm_scale.config.errors import ConfigError
from calm_scale.config.files import checked
from calm_scale.config.section import FORBIDDEN, OF_THE_MODEL, RESULTS, SAFE, Policy, Section
from calm_scale.config.training import TrainingConfig


class BackboneConfig(Section):
    """Llama-style Transformer over P positions."""

    field_policy = OF_THE_MODEL

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer layers L."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    ffn_size: int = Field(gt=0)
    """Width inside the feed-forward layers (SwiGLU)."""
    num_heads: int = Field(default=16, gt=0)
    """Attention heads of a layer."""
    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads of a layer; null is one for each head."""
    positions: Annotated[int, FORBIDDEN] = Field(default=2048, gt=1)
    """Positions P of a training sample, one patch of K tokens each."""
    rope_theta: Annotated[float, Policy("results", model=True)] = Field(default=10_000.0, gt=0)
    """Base of the rotary embeddings."""
    norm_eps: Annotated[float, Policy("results", model=True)] = Field(default=1e-6, gt=0)
    """Added to the variance in every RMSNorm."""
    init_std: Annotated[float, SAFE] = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads(self) -> BackboneConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads} gives heads of width {self.head_dim}: "
                "rotary embeddings turn pairs of numbers, so it must be even"
            )
        if self.num_heads % self.query_groups:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of query groups {self.query_groups}"
            )
        return self

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


class HeadSection(Section):
    """The settings of a generative head. A field without a policy of its own belongs to the model."""

    field_policy = OF_THE_MODEL


class EnergyHeadConfig(HeadSection):
    """Single-step sampler trained with the energy loss (Eq. 10)."""

    kind: Literal["energy"] = "energy"
    """The head's name."""
    num_blocks: int | None = Field(default=None, gt=0)
    """Residual blocks; null is L/4."""
    noise_size: int = Field(default=64, gt=0)
    """Numbers of noise that a sample begins with."""
    num_samples: Annotated[int, RESULTS] = Field(default=8, ge=2)
    """Samples of the head at each position in the loss, N."""
    num_posterior: Annotated[int, RESULTS] = Field(default=100, ge=1)
    """Draws from the encoder's posterior at each position in the loss, M."""
    alpha: Annotated[float, RESULTS] = Field(default=1.0, gt=0, le=2)
    """Exponent of the distances; the score is strictly proper below 2, at 2 only the samples' mean counts."""


class FlowHeadConfig(HeadSection):
    """Flow matching with a midpoint sampler (Figs. 8–9)."""

    kind: Literal["flow"] = "flow"
    """The head's name."""
    num_blocks: int | None = Field(default=None, gt=0)
    """Residual blocks; null is L/4."""
    num_repeats: Annotated[int, RESULTS] = Field(default=8, ge=1)
    """Times and noises drawn at each position in the loss."""
    sampling_steps: Annotated[int, SAFE] = Field(default=4, ge=1)
    """Steps of the sampler."""


class DiffusionHeadConfig(HeadSection):
    """Cosine-schedule diffusion with an ancestral sampler (Figs. 8–9)."""

    kind: Literal["diffusion"] = "diffusion"
    """The head's name."""
    num_blocks: int | None = Field(default=None, gt=0)
    """Residual blocks; null is L/4."""
    num_repeats: Annotated[int, RESULTS] = Field(default=8, ge=1)
    """Times and noises drawn at each position in the loss."""
    train_timesteps: Annotated[int, Policy("results", model=True)] = Field(default=1000, ge=2)
    """Timesteps of the noise schedule."""
    sampling_steps: Annotated[int, SAFE] = Field(default=100, ge=1)
    """Steps of the sampler."""


class SoftmaxHeadConfig(HeadSection):
    """The discrete autoregressive baseline: token input (K = 1), softmax output, untied embeddings."""

    kind: Literal["softmax"] = "softmax"
    """The head's name."""


def _kind(head: object) -> str | None:
    kind = head.get("kind") if isinstance(head, dict) else getattr(head, "kind", None)
    return kind if isinstance(kind, str) else None


HeadConfig = Annotated[
    Annotated[EnergyHeadConfig, Tag("energy")]
    | Annotated[FlowHeadConfig, Tag("flow")]
    | Annotated[DiffusionHeadConfig, Tag("diffusion")]
    | Annotated[SoftmaxHeadConfig, Tag("softmax")],
    Discriminator(
        _kind,
        custom_error_type="head_kind",
        custom_error_message="a head needs `kind`: energy, flow, diffusion or softmax",
    ),
]


class ParallelConfig(Section):
    """Megatron-core layout: world = tensor × pipeline × data."""

    field_policy = SAFE

    tensor: int = Field(default=1, gt=0)
    """Ranks that share every layer."""
    pipeline: int = Field(default=1, gt=0)
    """Stages that the layers are divided over."""
    virtual_pipeline: int = Field(default=1, gt=0)
    """Pieces of each stage in an interleaved pipeline."""
    data: int | None = Field(default=None, gt=0)
    """Replicas of the model; null takes what is left of the world."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor ranks by position."""
    distributed_optimizer: bool = True
    """Split the optimizer state over the replicas."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, attention, or whole layers."""
    head_parallelism: Literal["position", "tensor"] = "position"
    """Over the tensor ranks, split the head by positions (weights replicated) or its weights (energy only)."""
    pipeline_layout: Literal["auto", "even"] | tuple[int, ...] = "auto"
    """Layers of each stage: balanced by FLOPs, equal, or listed."""
    check_replicas: bool = False
    """Compare weights that should be equal on several ranks after every step; slow."""

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


class LMStage(Section):
    """Everything the language-model job needs."""

    backbone: BackboneConfig
    """The Transformer."""
    head: HeadConfig = EnergyHeadConfig()
    """The generative head."""
    input_mode: Annotated[Literal["discrete", "continuous", "both"], OF_THE_MODEL] = "discrete"
    """What a position reads of the patch before: its tokens, its latent vector, or both."""
    training: TrainingConfig
    """Steps, batch, optimizer and checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """The layout over the ranks."""
    autoencoder: Annotated[Path | None, SAFE] = None
    """Folder of an exported autoencoder; null is this run's own, `autoencoder/export`."""

    @model_validator(mode="after")
    def _layout_fits(self) -> LMStage:
        b, p = self.backbone, self.parallel
        for name, count in (
            ("num_heads", b.num_heads),
            ("query groups", b.query_groups),
            ("ffn_size", b.ffn_size),
            ("hidden_size", b.hidden_size),
        ):
            if count % p.tensor:
                raise ValueError(f"{name} {count} is not divisible by tensor parallel size {p.tensor}")
        if isinstance(p.pipeline_layout, tuple) and sum(p.pipeline_layout) != b.num_layers:
            raise ValueError(
                f"pipeline_layout {list(p.pipeline_layout)} sums to {sum(p.pipeline_layout)}, "
                f"the backbone has {b.num_layers} layers"
            )
        chunks = p.pipeline * p.virtual_pipeline
        if p.pipeline_layout == "even" and b.num_layers % chunks:
            raise ValueError(
                f"{b.num_layers} layers do not split evenly over {chunks} stages; use pipeline_layout: auto"
            )
        if b.num_layers < chunks:
            raise ValueError(
                f"{chunks} pipeline stages need at least {chunks} layers, the backbone has {b.num_layers}"
            )
        if p.sequence_parallel and b.positions % p.tensor:
            raise ValueError(f"positions {b.positions} is not divisible by tensor parallel size {p.tensor}")
        self._head_fits()
        if p.data is not None:
            self.micro_batches(p.data)
        return self

    def _head_fits(self) -> None:
        b, p = self.backbone, self.parallel
        if self.head.kind == "softmax" or p.tensor == 1:
            return
        if p.head_parallelism == "position" and b.positions % p.tensor:
            raise ValueError(
                f"head_parallelism position gives each of {p.tensor} tensor-parallel ranks an equal share of the "
                f"positions, and {b.positions} positions do not divide"
            )
        if p.head_parallelism == "tensor" and self.head.kind != "energy":
            raise ValueError(
                f"head_parallelism tensor splits the energy head's weights; head {self.head.kind} needs position"
            )

    def micro_batches(self, data_parallel: int) -> int:
        """Micro-batches per rank and step.

        Raises:
            ConfigError: the batch does not divide, or an interleaved pipeline cannot take that many.
        """
        parallel, number = self.parallel, self.training.accumulation(data_parallel)
        if parallel.virtual_pipeline > 1 and number % parallel.pipeline:
            raise ConfigError(
                f"virtual_pipeline needs micro-batches per step ({number}) in a multiple of pipeline "
                f"{parallel.pipeline}; change global_batch or micro_batch"
            )
        return number

    def for_inference(self, tensor: int = 1, asked_by: str = "--tensor-parallel") -> LMStage:
        """The same model as evaluation and generation hold it: whole, or split over ``tensor`` ranks.

        Raises:
            ConfigError: the model's shape does not split so.
        """
        parallel = ParallelConfig(tensor=tensor, pipeline_layout="even")
        return checked(LMStage, {**self.model_dump(), "parallel": parallel}, f"{asked_by} {tensor}")

    @property
    def num_blocks(self) -> int:
        """Residual blocks in the generative head (default L/4, at least one)."""
        return getattr(self.head, "num_blocks", None) or max(1, self.backbone.num_layers // 4)

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.parallel.model_parallel

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the whole layout; None where it leaves the number of replicas open."""
        return None if self.parallel.data is None else self.replica_ranks * self.parallel.data

    @property
    def sample_patches(self) -> int:
        """Patches of one training sample."""
        return self.backbone.positions
