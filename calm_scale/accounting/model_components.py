"""The whole model of a run, component by component; what every other account is computed from.

All components are counted per position, those of the autoencoder per patch of K tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calm_scale.accounting.components import Component, Part, by_part, linear, parameters_of, weights
from calm_scale.config.autoencoder import AutoencoderModelConfig
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
    return config.lm is not None and config.lm.predicts_tokens


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


def model_of(config: RunConfig) -> AutoencoderModelConfig:
    """The autoencoder's widths; the paper's defaults where the run has no autoencoder section."""
    return config.autoencoder.model if config.autoencoder else AutoencoderModelConfig()


@lru_cache(maxsize=64)
def encoder(model: AutoencoderModelConfig, vocab_size: int, patch_size: int) -> tuple[Component, ...]:
    """Encoder, ``[K] ids → [2l]``: token blocks, squeeze, patch blocks, projection to mean and log σ."""
    a, k, half = model.hidden_size, patch_size, model.encoder_layers // 2
    return (
        weights("autoencoder.embedding", "encoder", vocab_size * a),
        *_blocks("encoder.token", "encoder", model, half, rows=k),
        linear("encoder.squeeze", "encoder", k * a, a, bias=True),
        *_blocks("encoder.patch", "encoder", model, half, rows=1),
        weights("encoder.norm", "encoder", a),
        linear("encoder.to_latent", "encoder", a, 2 * model.latent(k), bias=True),
    )


@lru_cache(maxsize=64)
def decoder(model: AutoencoderModelConfig, vocab_size: int, patch_size: int) -> tuple[Component, ...]:
    """Decoder, ``[l] → [K, V]`` logits; the vocabulary projection is tied to the embedding (no parameters)."""
    a, k, half = model.hidden_size, patch_size, model.decoder_layers // 2
    logits = replace(linear("decoder.logits", "decoder", a, vocab_size, rows=k), parameters=0)
    return (
        linear("decoder.from_latent", "decoder", model.latent(k), a, bias=True),
        *_blocks("decoder.patch", "decoder", model, half, rows=1),
        linear("decoder.expand", "decoder", a, k * a, bias=True),
        *_blocks("decoder.token", "decoder", model, half, rows=k),
        weights("decoder.norm", "decoder", a),
        logits,
    )


def autoencoder_components(config: RunConfig) -> list[Component]:
    """Encoder and decoder as they are trained in stage 1, per patch."""
    model = model_of(config)
    return [
        *encoder(model, config.vocab_size, config.patch_size),
        *decoder(model, config.vocab_size, config.patch_size),
    ]


def frozen_encoder(config: RunConfig) -> list[Component]:
    """The encoder as stage 2 uses it: forward only while training, never while generating from tokens."""
    return [
        replace(c, uses=min(c.uses, 1), backward=0, per_step=0, per_draw=0)
        for c in encoder(model_of(config), config.vocab_size, config.patch_size)
    ]


def frozen_decoder(config: RunConfig) -> list[Component]:
    """The decoder as generation uses it: once per candidate, never in LM training."""
    return [
        replace(c, uses=0, backward=0, per_step=0, per_draw=1)
        for c in decoder(model_of(config), config.vocab_size, config.patch_size)
    ]


def _blocks(
    prefix: str, part: Part, model: AutoencoderModelConfig, num_layers: int, rows: int
) -> list[Component]:
    a, f = model.hidden_size, model.ffn_size
    one = [
        weights("norm", part, a),
        linear("gate_up", part, a, 2 * f, rows=rows),
        linear("down", part, f, a, rows=rows),
    ]
    return [replace(c, name=f"{prefix}.{i}.{c.name}") for i in range(num_layers) for c in one]


def head_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """The head of the run, without loss and frozen autoencoder."""
    return list(config.require_lm().head.components(config, shared_condition=shared_condition))


def loss_components(config: RunConfig) -> list[Component]:
    """Matrix products of the head's loss; nothing where it is element-wise."""
    return list(config.require_lm().head.loss_components(config))


def input_encoder(config: RunConfig) -> list[Component]:
    """The frozen encoder in front of the first stage; nothing unless the model reads latents."""
    if config.require_lm().input_mode == "discrete":
        return []
    return [replace(c, parameters=0, per_step=c.uses) for c in frozen_encoder(config) if c.forward]


def target_encoder(config: RunConfig) -> list[Component]:
    """The frozen encoder beside the head, which gives the posterior of the next patch; nothing for the baseline."""
    return [] if is_autoregressive(config) else frozen_encoder(config)


def frozen_components(config: RunConfig) -> list[Component]:
    """Frozen autoencoder beside the language model: encoder while training, decoder while generating.

    A model that reads latents encodes every patch twice while training (as input on the first stage, as target on
    the last) and once while generating.
    """
    if is_autoregressive(config):
        return []
    return [*target_encoder(config), *input_encoder(config), *frozen_decoder(config)]


def trained_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """Every component the language model trains."""
    return [
        *input_components(config),
        *backbone_components(config),
        *head_components(config, shared_condition=shared_condition),
    ]


def lm_components(config: RunConfig, *, shared_condition: bool = True) -> list[Component]:
    """Language model, loss and frozen autoencoder, per position of P."""
    return [
        *trained_components(config, shared_condition=shared_condition),
        *loss_components(config),
        *frozen_components(config),
    ]


def recomputed(component: Component, mode: str) -> int:
    """Forward MACs per position that the backward pass runs again.

    ``full``: every layer, and what the head says of its own; ``selective``: core attention.
    """
    in_layer = component.part == "backbone" or component.recomputed
    if (mode == "full" and in_layer) or (mode == "selective" and component.attention):
        return component.training_forward
    return 0


def parameters(config: RunConfig) -> dict[str, int]:
    """Trained parameters by part: ``embedding``, ``input``, ``backbone``, ``head`` or ``output``, and ``autoencoder``.

    The whole model, never one shard of it, whatever the layout. Sections that are absent do not appear.
    """
    counts: dict[str, int] = {}
    if config.lm is not None:
        parts: dict[Part, list[Component]] = by_part(trained_components(config))
        counts |= {part: parameters_of(found) for part, found in parts.items()}
    if config.autoencoder is not None or (config.lm is not None and not is_autoregressive(config)):
        counts["autoencoder"] = parameters_of(autoencoder_components(config))
    return counts


def lm_parameters(config: RunConfig) -> int:
    """Trained parameters of the language model, without the frozen autoencoder."""
    return parameters_of(trained_components(config))
