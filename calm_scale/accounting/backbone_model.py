"""Components of the language model below its head, per position (method §2)."""

from __future__ import annotations

from functools import lru_cache

from calm_scale.accounting.components import Component, linear, weights
from calm_scale.config.lm import BackboneConfig
from calm_scale.config.run import RunConfig


def input_components(config: RunConfig) -> list[Component]:
    """Embedding and input compressor: ``[K] ids`` (or ``[l]`` latent, or both) → ``[d]``.

    Tokens: two linear layers over the K concatenated embeddings. Latent: one linear layer. Then one LayerNorm.
    """
    lm = config.require_lm()
    d, k, mode = lm.backbone.hidden_size, config.patch_size, lm.input_mode
    found: list[Component] = []
    if mode != "continuous":
        found.append(weights("embedding", "embedding", config.vocab_size * d))
    if is_autoregressive(config):
        return found
    if mode != "continuous":
        found.append(linear("input.expand", "input", k * d, 2 * d, bias=True))
        found.append(linear("input.contract", "input", 2 * d, d, bias=True))
    if mode != "discrete":
        found.append(linear("input.latent", "input", config.latent_size, d, bias=True, backward=1))
    return [*found, weights("input.norm", "input", 2 * d)]


def is_autoregressive(config: RunConfig) -> bool:
    """True for the AR baseline: tokens in, softmax out."""
    return config.lm is not None and config.lm.head.kind == "softmax"


@lru_cache(maxsize=1024)
def layer_components(backbone: BackboneConfig, index: int) -> tuple[Component, ...]:
    """One Llama layer: RMSNorm, grouped-query attention with RoPE, RMSNorm, SwiGLU; no biases."""
    d, ff, p = backbone.hidden_size, backbone.ffn_size, backbone.positions
    kv = backbone.query_groups * backbone.head_dim
    name = f"layer.{index}"
    return (
        weights(f"{name}.norms", "backbone", 2 * d),
        linear(f"{name}.attention.qkv", "backbone", d, d + 2 * kv),
        # Every query head meets P keys whatever the number of key/value heads: GQA does not change this product.
        Component(f"{name}.attention.scores", "backbone", 0, p * d, attention=True),
        Component(f"{name}.attention.values", "backbone", 0, p * d, attention=True),
        linear(f"{name}.attention.out", "backbone", d, d),
        linear(f"{name}.mlp.gate_up", "backbone", d, 2 * ff),
        linear(f"{name}.mlp.down", "backbone", ff, d),
    )


def backbone_components(config: RunConfig) -> list[Component]:
    """All layers and the final norm."""
    backbone = config.require_lm().backbone
    layers = [c for i in range(backbone.num_layers) for c in layer_components(backbone, i)]
    return [*layers, weights("final_norm", "backbone", backbone.hidden_size)]


def softmax_output(config: RunConfig) -> list[Component]:
    """The AR baseline's untied output projection, ``[d] → [V]``."""
    return [linear("output", "output", config.require_lm().backbone.hidden_size, config.vocab_size)]
