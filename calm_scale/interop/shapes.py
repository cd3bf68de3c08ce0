"""The shapes that a published language model's tensors must have, from its settings alone."""

from __future__ import annotations

import torch

from calm_scale.config.run import RunConfig
from calm_scale.interop.files import InteropError, WeightFiles
from calm_scale.interop.slots import EMBEDDING, HEAD
from calm_scale.lm.build import language_model_stage
from calm_scale.lm.heads import build_head

Shape = tuple[int, ...]


def published_shapes(run: RunConfig) -> dict[str, Shape]:
    """Published name → shape, with the d, f, h, g, K and l of the run (no memory is taken)."""
    stage = language_model_stage(run)
    backbone = stage.backbone
    d, f, k = backbone.hidden_size, backbone.ffn_size, run.patch_size
    shared = backbone.query_groups * backbone.head_dim
    shapes: dict[str, Shape] = {EMBEDDING: (run.vocab_size, d), "transformer.norm.weight": (d,)}
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
    with torch.device("meta"):
        head = build_head(stage, run.latent_size)
    return shapes | {HEAD + name: tuple(p.shape) for name, p in head.named_parameters()}


def check_shape(files: WeightFiles, name: str, stored_name: str, wanted: Shape) -> None:
    """Raises InteropError unless the stored tensor has the shape; the embedding may have any number of rows."""
    found = tuple(files.outline(stored_name).shape)
    fits = found[1:] == wanted[1:] and len(found) == len(wanted) if name == EMBEDDING else found == wanted
    if not fits:
        raise InteropError(
            f"{files.folder}: {stored_name} is {list(found)}, its config.json makes it {list(wanted)}"
        )
