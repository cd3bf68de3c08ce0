"""How each weight of our language model is made of published ones, and back.

Our names are the checkpoint's global keys, so the same table serves every tensor, pipeline and data layout.
Megatron stores q, k and v of a query group one after another in ``linear_qkv`` and the gate above the up rows in
``linear_fc1``; the head's names are the published ones already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calm_scale.config.lm import BackboneConfig, LMStage
from calm_scale.config.run import RunConfig
from calm_scale.interop.files import InteropError, Shape
from calm_scale.lm.heads.energy import EnergyHeadConfig

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "generative_head."
HEAD_ALIAS = "mlp_generator."
EMBEDDING = "transformer.embed_tokens.weight"


@dataclass(frozen=True)
class Slot:
    """One of our weights: published ``names``, ``join`` published → ours, ``split`` ours → published."""

    key: str
    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def slots_of(stage: LMStage) -> list[Slot]:
    """The whole table of an energy-head CALM with discrete input.

    Raises:
        InteropError: another head or input mode; the published layout has no names for them.
    """
    if not isinstance(stage.head, EnergyHeadConfig) or stage.input_mode != "discrete":
        raise InteropError(
            "the published layout is known for the energy head with discrete input only, this run has head "
            f"{stage.head.kind} and input_mode {stage.input_mode}"
        )
    slots = list(_compressor())
    for layer in range(stage.backbone.num_layers):
        slots += _layer(layer, stage.backbone)
    slots.append(_same("decoder.final_layernorm.weight", "transformer.norm.weight"))
    slots += [_same(f"head.{name}", HEAD + name) for name in _head_names(stage.num_blocks)]
    return slots


def _compressor() -> Iterator[Slot]:
    yield _same("compressor.tokens.embedding.table.weight", EMBEDDING)
    for ours, theirs in (("tokens.expand", "0"), ("tokens.contract", "2"), ("norm", "3")):
        for kind in ("weight", "bias"):
            yield _same(f"compressor.{ours}.{kind}", f"embed_proj.{theirs}.{kind}")


def _layer(number: int, backbone: BackboneConfig) -> Iterator[Slot]:
    ours, theirs = f"decoder.layers.{number}.", f"transformer.layers.{number}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    yield _same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
    yield Slot(
        ours + "self_attention.linear_qkv.weight",
        tuple(f"{attention}{x}_proj.weight" for x in "qkv"),
        lambda qkv: join_qkv(qkv, backbone),
        lambda whole: split_qkv(whole, backbone),
    )
    yield _same(ours + "self_attention.linear_proj.weight", attention + "o_proj.weight")
    yield _same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")
    yield Slot(
        ours + "mlp.linear_fc1.weight",
        (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        lambda halves: torch.cat(list(halves)),
        lambda whole: whole.chunk(2),
    )
    yield _same(ours + "mlp.linear_fc2.weight", mlp + "down_proj.weight")


def join_qkv(parts: Sequence[Tensor], backbone: BackboneConfig) -> Tensor:
    """q ``[h·d_h, d]``, k and v ``[g·d_h, d]`` → ``[(h+2g)·d_h, d]``, one query group after another."""
    groups = [part.unflatten(0, (backbone.query_groups, -1)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def split_qkv(whole: Tensor, backbone: BackboneConfig) -> Sequence[Tensor]:
    """The inverse of ``join_qkv``."""
    per_group = backbone.num_heads // backbone.query_groups * backbone.head_dim
    groups = whole.unflatten(0, (backbone.query_groups, -1))
    parts = groups.split([per_group, backbone.head_dim, backbone.head_dim], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _head_names(num_blocks: int) -> Iterator[str]:
    modules = ["noise_embd", "hidden_embd", "norm_hidden", "norm_noise"]
    for block in range(num_blocks):
        parts = ("in_ln", "linears.0", "linears.2", "linears.4", "down_proj")
        modules += [f"mlp_blocks.{block}.{part}" for part in parts]
    modules += [f"final_layer.{part}" for part in ("in_ln", "linears.0", "linears.2")]
    for module in modules:
        yield f"{module}.weight"
        yield f"{module}.bias"


def _same(ours: str, theirs: str) -> Slot:
    return Slot(ours, (theirs,), lambda parts: parts[0], lambda whole: [whole])


def published_shapes(run: RunConfig, stored_vocab_size: int) -> dict[str, Shape]:
    """Published name → shape, with the d, f, h, g, K and l of the run (no memory is taken).

    ``stored_vocab_size`` is V of the published config.json; the run's may be cut or padded.

    Raises:
        InteropError: sizes that no tensor can have.
    """
    stage = run.require_lm()
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
            head = stage.head.build(stage, run.latent_size)
    except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: beyond 64 bits
        raise InteropError(f"config.json describes a head that no memory could hold: {error}") from None
    return shapes | {HEAD + name: tuple(p.shape) for name, p in head.named_parameters()}
