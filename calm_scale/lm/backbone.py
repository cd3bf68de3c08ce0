"""The Llama-style backbone: Megatron's TransformerBlock with our norms and attention in its layer spec.

Attention goes through ``scaled_dot_product_attention``: scores are never materialised, keys can be cached. With
sequence parallelism each tensor-parallel rank normalises its own positions, so the gradient of a norm's weight is a
partial sum; Megatron adds them up over the group for every parameter with the ``sequence_parallel`` mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from calm_scale.config.lm import BackboneConfig
from calm_scale.runtime.fast_kernels import has_transformer_engine

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in Megatron's layer-spec signature."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=getattr(config, "params_dtype", None)))
        mark_sequence_parallel(self, bool(getattr(config, "sequence_parallel", False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] → [..., d]."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with weight and bias, marked the same way."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=getattr(config, "params_dtype", None))
        mark_sequence_parallel(self, bool(getattr(config, "sequence_parallel", False)))


def mark_sequence_parallel(module: nn.Module, enabled: bool) -> None:
    """Tell Megatron whether this module's parameters see only a slice of the positions."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = enabled  # type: ignore[attr-defined]


@dataclass
class LayerCache:
    """Keys and values of one layer: buffers [b, g, max_positions, d_h], ``length`` positions filled."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [b, g, n, d_h] behind what is there; return everything so far [b, g, length, d_h]."""
        stop = self.length + key.shape[2]
        self.keys[:, :, self.length : stop] = key
        self.values[:, :, self.length : stop] = value
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class SdpaCoreAttention(nn.Module):
    """Causal attention in the signature of Megatron's layer spec.

    Input query [s, b, h, d_h], key and value [s, b, g, d_h] (g key/value heads); output [s, b, h·d_h].
    """

    def __init__(self, config: object, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = softmax_scale
        self.cache: LayerCache | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Attend causally, to the cached positions too when a cache is attached. ``attention_mask`` is not used."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.cache is not None:
            k, v = self.cache.append(k, v)
        num_new, num_all = q.shape[2], k.shape[2]
        mask = None
        if 1 < num_new < num_all:
            mask = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device).tril(num_all - num_new)
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=num_new == num_all,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def attached(attentions: list[SdpaCoreAttention], caches: list[LayerCache]) -> Iterator[None]:
    """Let these layers read and extend these caches for the duration of a forward pass."""
    for attention, cache in zip(attentions, caches, strict=True):
        attention.cache = cache
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None


def build_backbone(
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    for_inference: bool = False,
) -> TransformerBlock:
    """This stage's layers, and the final norm on the last stage. Hidden states are [s, b, d].

    On a GPU with Transformer Engine its layers are used for training; inference takes the local ones, whose
    attention can read a key-value cache. Both have the same weights under the same checkpoint keys.
    """
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    on_gpu = not config.use_cpu_initialization
    fused = on_gpu and not for_inference and has_transformer_engine()
    spec = transformer_engine_layer() if fused else local_layer()
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlock(
        config=config,
        spec=TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def local_layer() -> ModuleSpec:
    """Megatron's parallel linear layers, our RMSNorm, attention without materialised scores, SwiGLU."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SdpaCoreAttention,
                    linear_proj=RowParallelLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def transformer_engine_layer() -> ModuleSpec:
    """Transformer Engine's fused layers. Their norms live inside the linear layers; the keys say where they belong."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.sharded_state_dict_keys_map = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    return spec


class Rotary(nn.Module):
    """Rotary angles [positions, 1, 1, d_h] for Megatron's attention (rotate-half form). Holds no parameters.

    Angles are fp32 whatever the model's type. The table grows when a longer sequence than trained on is read.
    """

    def __init__(self, config: BackboneConfig, device: torch.device) -> None:
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._frequencies = config.rope_theta**-exponent
        self._device = device
        self._angles = self._table(config.positions)

    def forward(self, start: int, stop: int) -> torch.Tensor:
        """Angles of positions [start, stop)."""
        if stop > self._angles.shape[0]:
            self._angles = self._table(2 * stop)
        return self._angles[start:stop]

    def _table(self, num_positions: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), self._frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :].float().to(self._device)


def core_attentions(backbone: TransformerBlock) -> list[SdpaCoreAttention]:
    """The attention of every layer here, in order.

    Raises:
        TypeError: these layers keep no key-value cache.
    """
    found = [layer.self_attention.core_attention for layer in backbone.layers]
    if not all(isinstance(attention, SdpaCoreAttention) for attention in found):
        raise TypeError("these layers keep no key-value cache: build the model for inference")
    return found
