"""The language model: input compressor, backbone, head, layout and training (paper §3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from calm_scale.config.errors import ConfigError
from calm_scale.config.extensions import load_extension
from calm_scale.config.files import checked
from calm_scale.config.section import FORBIDDEN, OF_THE_MODEL, SAFE, Policy, Section
from calm_scale.config.training import TrainingConfig

if TYPE_CHECKING:
    from calm_scale.accounting.activations import Saved
    from calm_scale.accounting.communication import Traffic
    from calm_scale.accounting.components import Component
    from calm_scale.config.run import RunConfig
    from calm_scale.lm.heads.base import GenerativeHead


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


class HeadConfig(Section, ABC):
    """Everything known of one kind of head, without torch: settings, parameters, FLOPs, bytes, and how it is built.

    ``lm.head.kind`` names a subclass: a built-in one, or ``package.module:Name``, which is then the default of its
    ``kind``. A field without a policy of its own belongs to the model. All costs are per position.
    """

    field_policy = OF_THE_MODEL

    predicts: ClassVar[Literal["latents", "tokens"]] = "latents"
    """Latent vectors that the frozen autoencoder decodes, or the tokens themselves."""
    splits_weights: ClassVar[bool] = False
    """Whether ``head_parallelism: tensor`` can split its weights over the tensor-parallel ranks."""
    scales_noise: ClassVar[bool] = False
    """Whether it reads noise that ``algorithm: noise_scale`` can scale."""

    kind: str
    """The head's name."""

    def blocks(self, num_layers: int) -> int:
        """Residual blocks on a backbone of L layers."""
        return 0

    @property
    def num_listed(self) -> int:
        """Latents that with their weights are the head's whole law (``GenerativeHead.law``); 0 for a law of samples."""
        return 0

    @property
    def repeats(self) -> int:
        """Times its blocks run at each position while training."""
        return 1

    @abstractmethod
    def components(self, run: RunConfig, *, shared_condition: bool = True) -> Sequence[Component]:
        """Parameters and matrix products of the head, part ``head``, without the loss.

        ``shared_condition``: False counts what depends on the hidden state alone once for every sample.
        """

    def loss_components(self, run: RunConfig) -> Sequence[Component]:
        """Matrix products of the loss, part ``loss``; none where it is element-wise."""
        return ()

    @abstractmethod
    def kept_bytes(self, run: RunConfig, rows: int) -> Saved:
        """Activation bytes of head and loss for each position that a rank owns, of which it has ``rows``."""

    def traffic(self, run: RunConfig, hidden: float, micro_batches: int) -> Sequence[Traffic]:
        """What tensor-parallel ranks exchange inside the head in one step where its weights are split.

        ``hidden``: bytes of one micro-batch of hidden states.
        """
        raise ConfigError(f"lm.head.kind {self.kind}: its weights cannot be split over tensor-parallel ranks")

    @abstractmethod
    def build(self, stage: LMStage, latent_size: int) -> GenerativeHead:
        """The torch module, for hidden states of the backbone and latents of size l."""

    def tiny(self) -> HeadConfig:
        """The same head with few blocks and draws, for counting its operations in a second."""
        return self

    def loss_alone(self, run: RunConfig, batch: int) -> Callable[[bool], object] | None:
        """A call (with gradient or without) of the loss alone on ``batch`` sequences, where torch's counter sees other
        products in it than ``loss_components`` has; None where it counts them as they are."""
        return None

    def notes(self) -> Sequence[str]:
        """One line for each setting that is valid and rarely meant: its key in the section, and what it does."""
        return ()


class BlockHeadConfig(HeadConfig):
    """A head of residual blocks."""

    num_blocks: int | None = Field(default=None, gt=0)
    """Residual blocks; null is L/4."""

    def blocks(self, num_layers: int) -> int:
        """As many as given, or a quarter of the backbone's layers."""
        return self.num_blocks or max(1, num_layers // 4)

    def tiny(self) -> HeadConfig:
        """Two blocks."""
        return self.model_copy(update={"num_blocks": 2})


HEADS: Mapping[str, str] = {
    "energy": "calm_scale.lm.heads.energy:EnergyHeadConfig",
    "atoms": "calm_scale.lm.heads.atoms:AtomHeadConfig",
    "flow": "calm_scale.lm.heads.denoising:FlowHeadConfig",
    "diffusion": "calm_scale.lm.heads.denoising:DiffusionHeadConfig",
    "softmax": "calm_scale.lm.heads.softmax:SoftmaxHeadConfig",
}
"""The built-in heads; the room of the language model holds them."""


def head_class(kind: str) -> type[HeadConfig]:
    """The class of a head.

    Raises:
        ValueError: no such head, or what is named is none.
    """
    try:
        found = load_extension(HEADS.get(kind, kind), "calm_scale.heads", "lm.head.kind")
    except ConfigError as error:
        raise ValueError(f"{error}; built in are {', '.join(HEADS)}") from None
    if not (isinstance(found, type) and issubclass(found, HeadConfig)):
        raise ValueError(f"{kind} is not a head: it does not derive from calm_scale.config.lm.HeadConfig")
    return found


def _default_head() -> HeadConfig:
    return head_class("energy").model_validate({})


def _head(value: object) -> object:
    if isinstance(value, HeadConfig):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        raise PydanticCustomError(
            "head_kind",
            "a head needs `kind`: energy, atoms, flow, diffusion or softmax, or package.module:Name of your own",
        )
    try:
        of_kind = head_class(kind)
    except ValueError as error:
        detail = {
            "type": PydanticCustomError("head_kind", "{error}", {"error": str(error)}),
            "loc": ("kind",),
        }
        line = InitErrorDetails(**detail, input=kind)  # type: ignore[typeddict-item]
        raise ValidationError.from_exception_data("head", [line]) from None
    return of_kind.model_validate(value)


Head = Annotated[SerializeAsAny[HeadConfig], BeforeValidator(_head)]


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
    overlap: bool | None = None
    """Reduce gradients and gather weights while other layers compute; null: on GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, attention, or whole layers."""
    head_parallelism: Literal["position", "tensor"] = "position"
    """Over the tensor ranks, split the head by positions (weights replicated) or its weights (energy and atoms)."""
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
    head: Head = Field(default_factory=_default_head)
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
        if self.predicts_tokens or p.tensor == 1:
            return
        if p.head_parallelism == "position" and b.positions % p.tensor:
            raise ValueError(
                f"head_parallelism position gives each of {p.tensor} tensor-parallel ranks an equal share of the "
                f"positions, and {b.positions} positions do not divide"
            )
        if p.head_parallelism == "tensor" and not self.head.splits_weights:
            raise ValueError(
                f"head_parallelism tensor needs a head whose weights can be split; head {self.head.kind} needs position"
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
        return self.head.blocks(self.backbone.num_layers)

    @property
    def predicts_tokens(self) -> bool:
        """True for the autoregressive baseline: tokens in, a law over the vocabulary out, no autoencoder."""
        return self.head.predicts == "tokens"

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
