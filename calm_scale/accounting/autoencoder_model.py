"""Components of the autoencoder, per patch of K tokens (method §1, reference layout)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calm_scale.accounting.components import Component, Part, linear, weights
from calm_scale.config.autoencoder import AutoencoderModelConfig
from calm_scale.config.run import RunConfig


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
