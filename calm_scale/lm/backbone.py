"""The Llama-style backbone: Megatron's TransformerBlock with our norms and attention in its layer spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from calm_scale.config.lm import BackboneConfig
from calm_scale.lm.attention import SdpaCoreAttention
from calm_scale.lm.norms import RMSNorm
from calm_scale.runtime.megatron import has_transformer_engine

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig


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
