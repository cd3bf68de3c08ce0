"""How long the kernels of one rank take: products by their size, attention, and passes over memory.

A product of an [m, k] with a [k, n] matrix takes its FLOPs over the rate that large products reach, plus its operands
over the memory bandwidth, plus a gap: the sum, not the larger of the two, fits measured products of any size
(docs/scale.md). Training runs it three times; the one for the weights adds to an fp32 buffer.

A training program adds passes over memory and gaps between kernels, and overlaps some of its collectives. Its bytes
are fitted to published runs (docs/scale.md); everything else is what the programs state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calm_scale.accounting.activations import FP32, element
from calm_scale.accounting.components import FLOPS_PER_MAC, Component, causal
from calm_scale.accounting.hardware import COPY_SHARE, Device
from calm_scale.accounting.model_components import autoencoder_components, recomputed
from calm_scale.accounting.placement import local_parameters
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.run import RunConfig

GAP_SECONDS = 4e-6
"""Between two kernels of one stream."""

ATTENTION_BACKWARD = 2.5
"""Backward over forward FLOPs of an attention kernel that recomputes its scores."""

ROTATION_PASSES = 12
"""Passes over the queries for rotation and layout of queries, keys and values, forward and backward."""

SCORE_FLOPS = 80
"""fp32 operations per element of a posterior draw in the energy loss: Philox, Box-Muller, distances, gradients."""


@dataclass(frozen=True)
class Rates:
    """What one device does in a second, and the program it runs.

    Attributes:
        products: FLOP/s of large matrix products.
        attention: FLOP/s of attention.
        memory: bytes/s.
        vector: FLOP/s outside of the matrix units.
    """

    products: float
    attention: float
    memory: float
    vector: float
    software: Software


def rates(device: Device, software: Software) -> Rates:
    """The rates of a device."""
    return Rates(
        products=device.products * device.peak,
        attention=(device.fused_attention if software.fused_attention else device.attention) * device.peak,
        memory=COPY_SHARE * device.bandwidth,
        vector=device.vector,
        software=software,
    )


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of matrix products (attention included) and of everything else."""

    products: float = 0.0
    passes: float = 0.0

    def __add__(self, other: KernelSeconds) -> KernelSeconds:
        return KernelSeconds(self.products + other.products, self.passes + other.passes)

    def times(self, count: float) -> KernelSeconds:
        """``count`` of it."""
        return KernelSeconds(count * self.products, count * self.passes)

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.passes


@dataclass(frozen=True)
class Share:
    """What one rank computes of a model.

    Attributes:
        tokens: positions of one micro-batch, of all tensor-parallel ranks.
        width: bytes of an activation or weight in a product.
        tensor: tensor-parallel ranks.
        sequence_parallel: whether the backbone's norms see a slice of the positions.
        samples: times the head's blocks run at each position.
    """

    tokens: float
    width: int
    tensor: int = 1
    sequence_parallel: bool = False
    samples: int = 1


def micro_batch_seconds(config: RunConfig, components: list[Component], at: Rates) -> KernelSeconds:
    """One micro-batch through ``components`` on one tensor-parallel rank: forward, backward, recomputation."""
    lm = config.require_lm()
    share = Share(
        tokens=lm.backbone.positions * lm.training.micro_batch,
        width=element(lm),
        tensor=lm.parallel.tensor,
        sequence_parallel=lm.parallel.sequence_parallel,
        samples=lm.head.repeats,
    )
    total = KernelSeconds()
    for component in causal(components, lm.backbone.positions):
        again = recomputed(component, lm.parallel.recompute) > 0
        if component.attention:
            total += _attention(component, share, again, at)
        elif component.part == "loss":
            total += _energy_loss(component, share, at)
        else:
            total += _dense(component, share, _split(config, component), again, at)
    return total


def autoencoder_seconds(config: RunConfig, stage: AutoencoderStage, at: Rates) -> KernelSeconds:
    """One micro-batch of the autoencoder on one rank: forward and backward."""
    share = Share(
        tokens=stage.patches * stage.training.micro_batch,
        width=2 if stage.training.precision == "bf16" else FP32,
    )
    total = KernelSeconds()
    for component in autoencoder_components(config):
        total += _dense(component, share, 1.0, False, at)
    return total


def _split(config: RunConfig, component: Component) -> float:
    """Ranks that share a component's weights; the frozen encoder stands whole on each."""
    if not component.parameters or component.part == "encoder":
        return 1.0
    return component.parameters / local_parameters(config, component)


def _dense(component: Component, share: Share, split: float, again: bool, at: Rates) -> KernelSeconds:
    """A product and the passes over memory around it."""
    rows = share.tokens * component.uses * component.rows
    if component.part in ("head", "encoder") and split == 1:  # each rank computes positions of its own
        rows /= share.tensor
    passes = _passes(component, share, rows, split, at)
    if not component.num_in or not component.uses:
        return KernelSeconds(passes=passes)
    return KernelSeconds(product_seconds(component, share, rows, split, again, at), passes)


def product_seconds(
    component: Component, share: Share, rows: float, split: float, again: bool, at: Rates
) -> float:
    """One product forward and, as its component says, backward; ``split`` ranks share its weights."""
    num_in, num_out = component.num_in, component.num_out
    weights = num_in * num_out / split
    passes = 1 + component.backward + (1 if again else 0)
    flops = FLOPS_PER_MAC * rows * weights * passes
    moved = passes * share.width * (rows * (num_in + num_out / split) + weights)
    if component.backward == 2:
        moved += (2 * FP32 - share.width) * weights
    return flops / at.products + moved / at.memory + passes * GAP_SECONDS


def _passes(component: Component, share: Share, rows: float, split: float, at: Rates) -> float:
    """Elementwise work at a component: a norm, an activation, the rotation of queries and keys, a cross-entropy."""
    name, software = component.name.rsplit(".", 1)[-1], at.software
    trained = (1 + component.backward) / 3
    if name in ("output", "logits"):
        return rows * component.num_out / split * software.logit_bytes / at.memory
    if "norm" in name:
        return share.width * software.norm_passes * _norm_elements(component, share, rows) / at.memory
    if name in ("gate_up", "hidden", "expand"):
        elements = rows * component.num_out / split
        return trained * share.width * software.activation_passes * elements / at.memory
    if name == "qkv":
        rotated = ROTATION_PASSES * share.width * rows * component.num_in / split
        return rotated / at.memory + software.gaps * GAP_SECONDS
    return 0.0


def _norm_elements(component: Component, share: Share, rows: float) -> float:
    """Elements a norm sees: RMSNorm owns one weight for each, the LayerNorms of head and input two."""
    elements = component.parameters / (2 if component.part in ("head", "input") else 1)
    if component.part == "backbone" and share.sequence_parallel:
        rows /= share.tensor
    if component.part == "head":
        rows *= share.samples
    return rows * elements


def _attention(component: Component, share: Share, again: bool, at: Rates) -> KernelSeconds:
    forward = FLOPS_PER_MAC * component.forward * share.tokens / share.tensor
    backward = ATTENTION_BACKWARD * at.software.attention_backward
    return KernelSeconds(products=forward * (1 + backward + (1 if again else 0)) / at.attention)


def _energy_loss(component: Component, share: Share, at: Rates) -> KernelSeconds:
    return KernelSeconds(
        passes=SCORE_FLOPS * component.training_forward * share.tokens / share.tensor / at.vector
    )


DETERMINISTIC_BACKWARD = 1.6
"""FlashAttention 3 on an H100, causal, 8192 positions of 16 heads of 128: 3.80 ms with a fixed order of sums, 2.39
without (Dao-AILab/flash-attention, pull request 1893; 2.90 with the schedule that it adds)."""

DETERMINISTIC_COST = (
    f"deterministic: true. The FLOPs are the same. Attention's backward pass takes {DETERMINISTIC_BACKWARD:g} times as "
    "long as the usual kernel in the estimate of a step (published for FlashAttention 3 on an H100: 1.2 to 1.6). "
    "Ordered sums in the embedding's gradient and NCCL without sums in the switch cost time too, for which no figure "
    "is known."
)


@dataclass(frozen=True)
class Software:
    """A training program as the estimate of a step sees it.

    Attributes:
        name: how reports call it.
        norm_passes: passes over a [tokens, d] bf16 tensor by one norm, its residual and their backward.
        activation_passes: the same over the outputs of an activation's product.
        logit_bytes: bytes moved per logit by a softmax cross-entropy, forward and backward.
        gaps: kernels of one layer that are not matrix products, forward and backward.
        fused_attention: whether it runs the attention kernel made for the device (cuDNN) or FlashAttention-2.
        overlap_tensor: share of the tensor-parallel collectives hidden behind products.
        overlap_reduce: whether the reduction of gradients hides behind the last micro-batch's backward pass.
        overlap_gather: whether the gathering of weights hides behind the first micro-batch's forward pass.
        overlap_pipeline: share of the transfers between pipeline stages hidden behind work.
        gradient_bytes: bytes per parameter in the reduction of gradients.
        bucket_bytes: gradients reduced by one call.
        tensors_a_call: weights gathered one tensor a call instead of by buckets where True.
        attention_backward: time of attention's backward pass over that of the usual kernel.
        step_seconds: host work of one step that no device work hides: optimizer launch, logging, synchronisation.
    """

    name: str
    norm_passes: float
    activation_passes: float
    logit_bytes: float
    gaps: int
    fused_attention: bool = False
    overlap_tensor: float = 0.0
    overlap_reduce: bool = True
    overlap_gather: bool = False
    overlap_pipeline: float = 0.0
    gradient_bytes: int = 4
    bucket_bytes: float = 160e6
    tensors_a_call: bool = False
    attention_backward: float = 1.0
    step_seconds: float = 0.02

    def for_run(self, config: RunConfig) -> Software:
        """The program with the kernels and overlaps that the run's settings ask for."""
        software = replace(self, attention_backward=DETERMINISTIC_BACKWARD) if config.deterministic else self
        if config.require_lm().parallel.overlap is False:
            software = replace(software, overlap_reduce=False, overlap_gather=False)
        return software


FUSED = Software("fused kernels", norm_passes=12, activation_passes=4, logit_bytes=14, gaps=30)
EAGER = Software("plain kernels", norm_passes=67, activation_passes=10, logit_bytes=163, gaps=60)

OWN_LOGIT_BYTES = 54
"""Counted in this program's cross-entropies: logits in bf16 and fp32, softmax, gradient, and both products' reads."""

OURS = replace(
    FUSED,
    name="calm-scale with Transformer Engine",
    fused_attention=True,
    logit_bytes=OWN_LOGIT_BYTES,
    overlap_gather=True,
)
OURS_PLAIN = replace(
    EAGER, name="calm-scale without Transformer Engine", logit_bytes=OWN_LOGIT_BYTES, overlap_gather=True
)
