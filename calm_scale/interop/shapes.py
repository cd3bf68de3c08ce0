"""The shapes that a published language model's tensors must have, from its settings alone."""

from __future__ import annotations

import torch

from calm_scale.config.run import RunConfig
from calm_scale.interop.files import InteropError, Shape
from calm_scale.interop.slots import EMBEDDING, HEAD
from calm_scale.lm.build import language_model_stage
from calm_scale.lm.heads import build_head


def published_shapes(run: RunConfig, stored_vocab_size: int) -> dict[str, Shape]:
    """Published name → shape, with the d, f, h, g, K and l of the run (no memory is taken).

    ``stored_vocab_size`` is V of the published config.json; the run's may be cut or padded.

    Raises:
        InteropError: sizes that no tensor can have.
    """
    stage = language_model_stage(run)
    backbone = stage.backbone
    d, f, k = backbone.hidden_size, backbone.ffn_size, run.patch_size
    shared = backbone.query_groups * backbone.head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (stored_vocab_size, d), "transformer.norm.weight": (d,)}
    for number, rows, columns in (("0", 2 * d, k * d), ("2", d, 2 * d)):
        shapes |= {f"embed_proj.{number}.weight": (rows, columns), f"embed_proj.{number}.bias": (rows,)}
    shapes |= {"embed_proj.3.weight": (d,), "embed_proj.3.bias": (d,)}
    layer: dict[str, Shape] = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (shared, d),
        "self_attn.v_proj": (shared, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    for i in range(backbone.num_layers):
        shapes |= {f"transformer.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    try:
        with torch.device("meta"):
            head = build_head(stage, run.latent_size)
    except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: beyond 64 bits
        raise InteropError(f"config.json describes a head that no memory could hold: {error}") from None
    return shapes | {HEAD + name: tuple(p.shape) for name, p in head.named_parameters()}
