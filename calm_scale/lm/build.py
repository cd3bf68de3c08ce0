"""From a run's configuration to this rank's initialised pipeline stages."""

from __future__ import annotations

import torch

from calm_scale.accounting.placement import balance
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.lm import LMStage
from calm_scale.lm.heads import EnergyHead, GenerativeHead, build_head
from calm_scale.lm.initialization import initialize_weights
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import mark_tensor_parallel
from calm_scale.lm.tensor_head import split_energy_head
from calm_scale.runtime.megatron import DTYPES, Layout, Precision, transformer_config
from calm_scale.runtime.noise import stream_seed


def language_model_stage(run: RunConfig) -> LMStage:
    """The run's language-model section.

    Raises:
        ConfigError: there is none.
    """
    if run.lm is None:
        raise ConfigError("the run has no `lm` section: nothing says what language model to build")
    return run.lm


def build_models(
    run: RunConfig, layout: Layout, precision: Precision | None = None, *, for_inference: bool = False
) -> list[CalmModel]:
    """This rank's stages (one, or one per virtual stage), on the layout's device, with their initial weights.

    The weights depend on the run's seed and are the same tensors in every layout.
    """
    from megatron.core import parallel_state

    stage = language_model_stage(run)
    precision = precision or stage.training.precision
    stages = balance(run) if stage.parallel.pipeline > 1 else None
    config = transformer_config(stage.backbone, stage.parallel, precision, stages, layout.device)
    num_chunks = stage.parallel.virtual_pipeline
    models = []
    for chunk in range(num_chunks):
        vp_stage = chunk if num_chunks > 1 else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = CalmModel(
            run,
            config,
            _head(run, stage, layout, precision) if last else None,
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


def _head(run: RunConfig, stage: LMStage, layout: Layout, precision: Precision) -> GenerativeHead | None:
    if stage.head.kind == "softmax":
        return None
    with torch.random.fork_rng(devices=[]):
        head = build_head(stage, run.latent_size)
    generator = torch.Generator().manual_seed(stream_seed(run.seed, "weights", "head"))
    head.reset_parameters(stage.backbone.init_std, generator)
    if (
        stage.parallel.head_parallelism == "tensor"
        and layout.tensor_size > 1
        and isinstance(head, EnergyHead)
    ):
        head = split_energy_head(head, layout.tensor_rank, layout.tensor_size)
    for parameter in head.parameters():
        parameter.self_initialized = True  # type: ignore[attr-defined]
    return head.to(layout.device, DTYPES[precision])
