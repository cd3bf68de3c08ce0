"""What a training program adds to its matrix products: passes over memory, gaps between kernels, what it overlaps.

Three classes of kernels were told apart in published runs (docs/scale.md): ``fused`` (Transformer Engine or equally
fused norms, RoPE, activation and loss), ``mixed`` (FlashAttention and fused norms, the rest plain), ``eager`` (plain
operations, partly in fp32). Their bytes are fitted to those runs; everything else is what the programs state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from calm_scale.config.run import RunConfig

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
        """The program with the kernels that the run's settings ask for."""
        return replace(self, attention_backward=DETERMINISTIC_BACKWARD) if config.deterministic else self


FUSED = Software("fused kernels", norm_passes=12, activation_passes=4, logit_bytes=14, gaps=30)
MIXED = Software("partly fused kernels", norm_passes=46, activation_passes=4, logit_bytes=20, gaps=45)
EAGER = Software("plain kernels", norm_passes=67, activation_passes=10, logit_bytes=163, gaps=60)

OWN_LOGIT_BYTES = 54
"""Counted in this program's cross-entropies: logits in bf16 and fp32, softmax, gradient, and both products' reads."""

OURS = replace(
    FUSED,
    name="calm-scale with Transformer Engine",
    fused_attention=True,
    logit_bytes=OWN_LOGIT_BYTES,
)
OURS_PLAIN = replace(EAGER, name="calm-scale without Transformer Engine", logit_bytes=OWN_LOGIT_BYTES)
