"""Memory per rank, for every pipeline stage of the language model and for the autoencoder under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from calm_scale.accounting import activations
from calm_scale.accounting.activations import FP32, Kernels, element
from calm_scale.accounting.autoencoder_model import autoencoder_components, model_of
from calm_scale.accounting.backbone_model import lm_of
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.sharding import StageParameters, stage_parameters
from calm_scale.config.base import ConfigError
from calm_scale.config.run import RunConfig

ADAM_STATES = 2
_MAX_BUCKET = 500_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at its fullest moment.

    Attributes:
        weights: trained weights in the training precision.
        gradients: fp32 accumulation buffer.
        optimizer: fp32 master weights (bf16 only) and Adam's two moments.
        frozen: the frozen autoencoder (fp32).
        activations: kept for the backward pass of all micro-batches in flight, without the output side.
        output: final norm, head with N samples, loss workspace; or logits and softmax.
        buffers: communication and recomputation workspaces.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    frozen: float
    activations: float
    output: float
    buffers: float

    @property
    def total(self) -> float:
        """Sum of all."""
        parts: list[float] = [getattr(self, field.name) for field in fields(self) if field.name != "stage"]
        return sum(parts)


def language_model(
    config: RunConfig, data_parallel: int, *, kernels: Kernels = "fused", micro_batches: int | None = None
) -> list[Memory]:
    """Memory per rank of every stage at a data-parallel size; one per pipeline stage.

    ``micro_batches``: per rank and step; default what the global batch needs.
    """
    lm = lm_of(config)
    if micro_batches is None:
        micro_batches = lm.training.accumulation(data_parallel)
    return [_stage(config, held, data_parallel, kernels, micro_batches) for held in stage_parameters(config)]


def autoencoder(config: RunConfig, world_size: int) -> Memory:
    """Memory per rank of autoencoder training: weights, gradients and reduction in fp32, ZeRO stage as configured."""
    stage = config.autoencoder
    if stage is None:
        raise ConfigError(f"run '{config.name}' has no `autoencoder` section: nothing to train")
    count, zero = parameters_of(autoencoder_components(config)), stage.zero.stage
    shards = {name: world_size if zero >= level else 1 for level, name in enumerate(("o", "g", "w"), start=1)}
    offloaded = stage.zero.offload == "cpu"
    bucket = min(_MAX_BUCKET, count) if zero else 0
    positions = stage.patches * stage.training.micro_batch
    w = 2 if stage.training.precision == "bf16" else FP32
    return Memory(
        stage=0,
        weights=FP32 * count / shards["w"],
        gradients=FP32 * count / shards["g"],
        optimizer=0.0 if offloaded else ADAM_STATES * FP32 * count / shards["o"],
        frozen=0.0,
        activations=positions * _autoencoder_kept(config, w),
        output=positions * config.patch_size * config.vocab_size * (w + 2 * FP32),
        buffers=FP32 * bucket * (2 if world_size > 1 else 0),
    )


def fullest(stages: Sequence[Memory]) -> Memory:
    """The stage that needs most."""
    return max(stages, key=lambda stage: stage.total)


def _stage(
    config: RunConfig, held: StageParameters, data_parallel: int, kernels: Kernels, micro_batches: int
) -> Memory:
    lm = lm_of(config)
    parallel, w = lm.parallel, element(lm)
    sharded = data_parallel if parallel.distributed_optimizer else 1
    master = FP32 if lm.training.precision == "bf16" else 0
    positions = lm.training.micro_batch * lm.backbone.positions
    alive = activations.in_flight(config, held.stage, micro_batches)
    one_layer = activations.layer(config, kernels)
    kept = sum(count * layers * one_layer.kept for count, layers in zip(alive, held.layers, strict=True))
    passing = one_layer.passing
    output = 0.0
    if held.stage == 0:
        kept += alive[0] * activations.input_side(config).kept
    if held.stage == parallel.pipeline - 1:
        side = activations.output_side(config, kernels, positions)
        output = positions * (side.kept + side.passing)
    return Memory(
        stage=held.stage,
        weights=w * held.trained,
        gradients=FP32 * held.trained,
        optimizer=(master + ADAM_STATES * FP32) * held.trained / sharded,
        frozen=FP32 * held.frozen,
        activations=positions * kept,
        output=output,
        # Layers are recomputed after the output side has been freed.
        buffers=max(0.0, positions * passing - output)
        + _boundary(config, positions)
        + FP32 * held.position_parallel,
    )


def _boundary(config: RunConfig, positions: int) -> float:
    """Hidden states received from and sent to the neighbouring stages, forward and backward."""
    lm = lm_of(config)
    if lm.parallel.pipeline == 1:
        return 0.0
    sequence = lm.parallel.tensor if lm.parallel.sequence_parallel else 1
    return 2.0 * element(lm) * lm.backbone.hidden_size * positions / sequence


def _autoencoder_kept(config: RunConfig, w: int) -> float:
    """Bytes kept per patch by encoder and decoder: per block norm (fp32), its output and four FFN tensors."""
    model, k = model_of(config), config.patch_size
    a, f = model.hidden_size, model.ffn_size
    block = 2 * FP32 * a + w * a + 4 * w * f
    rows = (model.encoder_layers + model.decoder_layers) / 2 * (k + 1)
    return rows * block + w * (3 * k * a + 4 * a) + (2 * FP32 * a) * (k + 1) + 6 * FP32 * config.latent_size
