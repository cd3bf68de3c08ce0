"""From a run's configuration to this rank's pipeline stages with their initial weights.

Initial weights depend on the seed alone, never on the layout: each global tensor is drawn from a generator keyed by
(seed, its checkpoint key), and a rank keeps its part. Linear layers and embeddings are N(0, init_std²), biases zero,
norms one. Heads initialise themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calm_scale.accounting.placement import balance
from calm_scale.config import RunConfig
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import Piece, mark_tensor_parallel, pieces_of
from calm_scale.runtime.megatron import DTYPES, Layout, Precision, transformer_config
from calm_scale.runtime.noise import stream_seed


@torch.no_grad()
def initialize_weights(models: Sequence[CalmModel], seed: int, init_std: float) -> None:
    """Fill compressor, backbone and (autoregressive) output layer of these stages."""
    for model in models:
        for parameter in model.parameters():
            if getattr(parameter, "self_initialized", False):
                continue
            parameter.zero_()
    for piece in pieces_of(models):
        if not getattr(piece.parameter, "self_initialized", False):
            _fill(piece, seed, init_std)


def _fill(piece: Piece, seed: int, init_std: float) -> None:
    target = piece.of(piece.parameter)
    if target.dim() == 1:
        target.fill_(1.0 if piece.key.endswith("norm.weight") else 0.0)
        return
    generator = torch.Generator().manual_seed(stream_seed(seed, "weights", piece.key))
    whole = torch.empty(piece.global_shape).normal_(0.0, init_std, generator=generator)
    target.copy_(piece.cut(whole))


def build_models(
    run: RunConfig, layout: Layout, precision: Precision | None = None, *, for_inference: bool = False
) -> list[CalmModel]:
    """This rank's stages (one, or one per virtual stage), on the layout's device, with their initial weights.

    The weights depend on the run's seed and are the same tensors in every layout.
    """
    from megatron.core import parallel_state

    stage = run.require_lm()
    precision = precision or stage.training.precision
    stages = balance(run) if stage.parallel.pipeline > 1 else None
    config = transformer_config(
        stage.backbone, stage.parallel, precision, stages, layout.device, for_inference=for_inference
    )
    num_chunks = stage.parallel.virtual_pipeline
    models = []
    for chunk in range(num_chunks):
        vp_stage = chunk if num_chunks > 1 else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = CalmModel(
            run,
            config,
            _head(run, layout, precision) if last and not stage.predicts_tokens else None,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=last,
            vp_stage=vp_stage,
            device=layout.device,
            for_inference=for_inference,
        )
        models.append(model.to(layout.device))
    mark_tensor_parallel(models)
    initialize_weights(models, run.seed, stage.backbone.init_std)
    return models


def _head(run: RunConfig, layout: Layout, precision: Precision) -> GenerativeHead:
    stage = run.require_lm()
    with torch.random.fork_rng(devices=[]):
        head = stage.head.build(stage, run.latent_size)
    generator = torch.Generator().manual_seed(stream_seed(run.seed, "weights", "head"))
    head.reset_parameters(stage.backbone.init_std, generator)
    if stage.parallel.head_parallelism == "tensor" and layout.tensor_size > 1:
        head = head.split(layout.tensor_rank, layout.tensor_size)
    for parameter in head.parameters():
        parameter.self_initialized = True  # type: ignore[attr-defined]
    return head.to(layout.device, DTYPES[precision])
