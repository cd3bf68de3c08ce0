"""Megatron-core set-up: process groups from a layout, and the transformer configuration of our backbone."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from calm_scale.config import ConfigError
from calm_scale.config.lm import BackboneConfig, ParallelConfig
from calm_scale.runtime import cuda_on_cpu, fast_kernels
from calm_scale.runtime.world import COLLECTIVE_SECONDS, World

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Precision = Literal["fp32", "bf16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """This rank's place in world = tensor × pipeline × data."""

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_last_stage(self) -> bool:
        """Whether the last pipeline stage, which holds head and loss, runs here."""
        return self.pipeline_rank == self.pipeline_size - 1


def initialize(parallel: ParallelConfig, world: World) -> Layout:
    """Create Megatron's process groups for this layout and say where this rank stands.

    Consecutive ranks share a tensor-parallel group, then come the data-parallel replicas, then the stages.

    Raises:
        ConfigError: the layout does not fill the world.
    """
    _quiet()
    cuda_on_cpu.install()
    fast_kernels.has_transformer_engine()
    from megatron.core import parallel_state as state

    try:
        parallel.data_parallel(world.world_size)
    except ValueError as error:
        raise ConfigError(f"lm.parallel: {error}") from None
    _ensure_default_group(world.device)
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        distributed_timeout_minutes=round(COLLECTIVE_SECONDS / 60),
        create_gloo_process_groups=False,
    )
    _seed_model_parallel()
    return Layout(
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        data_rank=state.get_data_parallel_rank(),
        data_size=state.get_data_parallel_world_size(),
        tensor_group=state.get_tensor_model_parallel_group(),
        data_group=state.get_data_parallel_group(),
        device=world.device,
    )


def transformer_config(
    backbone: BackboneConfig,
    parallel: ParallelConfig,
    precision: Precision,
    stages: Sequence[int] | None,
    device: torch.device,
    *,
    for_inference: bool = False,
) -> TransformerConfig:
    """Megatron's configuration of our Llama-style backbone.

    Args:
        stages: layers of each pipeline stage (virtual stages in the order the data meets them); None when even.
        device: decides about the fused CUDA kernels, which a CPU does not have.
        for_inference: without the kernels of the training's layers.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_cuda = device.type == "cuda"
    kernels = fast_kernels.found() if on_cuda and not for_inference else fast_kernels.NONE
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    return TransformerConfig(
        num_layers=backbone.num_layers,
        hidden_size=backbone.hidden_size,
        ffn_hidden_size=backbone.ffn_size,
        num_attention_heads=backbone.num_heads,
        num_query_groups=backbone.query_groups,
        kv_channels=backbone.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=backbone.norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        pipeline_model_parallel_layout=None if stages is None else _megatron_layout(stages),
        sequence_parallel=parallel.sequence_parallel,
        # Weights are filled afterwards from generators keyed by their name, see lm/initialization.py.
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        calculate_per_token_loss=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # Gloo sends from the tensor's storage while the overlapped schedule already goes on: it must stay alive.
        deallocate_pipeline_outputs=on_cuda or parallel.virtual_pipeline == 1,
        # Interleaved stages send activations and gradients to the same peer at once. A batched exchange matches
        # them by order alone and mixes them up with two stages; the overlapped one keeps them apart.
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=precision == "bf16" and kernels.accumulate_in_layers,
        apply_rope_fusion=kernels.transformer_engine,
        persist_layer_norm=False,
        **kinds[parallel.recompute],
    )


def for_own_linears(config: TransformerConfig) -> TransformerConfig:
    """The configuration of Megatron's own linear layers: what Transformer Engine's fuse, these need Apex for."""
    if not config.gradient_accumulation_fusion or fast_kernels.found().apex_weight_gradient:
        return config
    own = copy.copy(config)
    own.gradient_accumulation_fusion = False
    return own


def _megatron_layout(stages: Sequence[int]) -> list[list[str]]:
    """Layer counts as Megatron's pipeline layout: the embedding before the first stage, the loss after the last."""
    rows = [["decoder"] * count for count in stages]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def _ensure_default_group(device: torch.device) -> None:
    """A world of one has no launcher and no process group yet; Megatron wants one all the same."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _seed_model_parallel() -> None:
    """Megatron's tracker must hold its named streams; nothing of ours draws from them (no dropout)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with torch.random.fork_rng(devices=[]):
        model_parallel_cuda_manual_seed(0)


def _quiet() -> None:
    """Megatron warns about every optional package it does not find, on every rank."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine)")
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\.\w+. is deprecated", category=FutureWarning
    )
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
