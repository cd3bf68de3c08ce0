"""Memory per rank, for every pipeline stage of the language model and for the autoencoder under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from calm_scale.accounting import activations
from calm_scale.accounting.activations import FP32, Kernels, element
from calm_scale.accounting.components import parameters_of
from calm_scale.accounting.model_components import autoencoder_components, model_of
from calm_scale.accounting.placement import StageParameters, stage_parameters
from calm_scale.config.run import RunConfig

ADAM_STATES = 2
_MAX_BUCKET = 500_000_000
_MIN_ROWS = 64
_SLICE_ELEMENTS: dict[Kernels, int] = {"local": 1 << 20, "fused": 1 << 28}


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
    lm = config.require_lm()
    if micro_batches is None:
        micro_batches = lm.training.accumulation(data_parallel)
    return [_stage(config, held, data_parallel, kernels, micro_batches) for held in stage_parameters(config)]


def autoencoder(config: RunConfig, world_size: int, *, kernels: Kernels = "fused") -> Memory:
    """Memory per rank of autoencoder training at its fullest moment: fp32 weights, gradients and reduction.

    ZeRO 1 to 3 keep a second, partitioned copy of the weights for the optimizer. ZeRO 3 gathers weights and, at
    DeepSpeed's reuse distance of 10⁹ parameters, holds a model of this size whole until its backward pass ends.
    """
    stage = config.require_autoencoder()
    count, zero = parameters_of(autoencoder_components(config)), stage.zero.stage
    share = FP32 * count / world_size
    mixed = stage.training.precision == "bf16"
    w = 2 if mixed else FP32
    whole_states = ADAM_STATES * FP32 * count if zero == 0 else (1 + ADAM_STATES) * share
    positions = stage.patches * stage.training.micro_batch
    return Memory(
        stage=0,
        weights=FP32 * count + (share if zero == 3 else 0.0),
        gradients=share if zero >= 2 else FP32 * count,
        optimizer=0.0 if stage.zero.offload == "cpu" else whole_states,
        frozen=0.0,
        activations=positions * _autoencoder_kept(config, w),
        output=_cross_entropy(config, positions, kernels, w),
        # The reduction bucket (ZeRO 2 has freed it by then), and autocast's bf16 copies of the weights.
        buffers=FP32 * min(_MAX_BUCKET, count) * (zero in (1, 3)) + 2 * count * mixed,
    )


def fullest(stages: Sequence[Memory]) -> Memory:
    """The stage that needs most."""
    return max(stages, key=lambda stage: stage.total)


def _stage(
    config: RunConfig, held: StageParameters, data_parallel: int, kernels: Kernels, micro_batches: int
) -> Memory:
    lm = config.require_lm()
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
    lm = config.require_lm()
    if lm.parallel.pipeline == 1:
        return 0.0
    sequence = lm.parallel.tensor if lm.parallel.sequence_parallel else 1
    return 2.0 * element(lm) * lm.backbone.hidden_size * positions / sequence


def _cross_entropy(config: RunConfig, positions: int, kernels: Kernels, w: int) -> float:
    """The sliced loss: three fp32 copies of one slice of logits (bf16: two halves more), the table's gradient."""
    rows, vocab_size = positions * config.patch_size, config.vocab_size
    budget = max(_MIN_ROWS, _SLICE_ELEMENTS[kernels] // vocab_size)
    logit = 3 * FP32 + (2 * w if w != FP32 else 0)
    return float(logit * min(rows, budget) * vocab_size + FP32 * vocab_size * model_of(config).hidden_size)


def _autoencoder_kept(config: RunConfig, w: int) -> float:
    """Bytes kept per patch by encoder and decoder.

    Per block: norm (two fp32 vectors), its output once in fp32 or twice in bf16, four FFN tensors. Then the inputs
    of the other linear maps, the norms in front of latent and logits, the posterior's terms, the loss's gradient.
    """
    model, k, latent = model_of(config), config.patch_size, config.latent_size
    a, f = model.hidden_size, model.ffn_size
    rows = (model.encoder_layers + model.decoder_layers) / 2 * (k + 1)
    blocks = rows * (3 * FP32 * a + 4 * w * f + FP32)
    maps = w * (2 * k * a + 2 * a + latent)
    return blocks + maps + 2 * FP32 * a * (k + 1) + 6.5 * FP32 * latent
