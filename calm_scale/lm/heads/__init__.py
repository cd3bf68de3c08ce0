"""Generative heads behind one interface: energy, flow matching, diffusion."""

from __future__ import annotations

from calm_scale.config import ConfigError
from calm_scale.config.lm import DiffusionHeadConfig, EnergyHeadConfig, FlowHeadConfig, LMStage
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.lm.heads.denoising.module import DiffusionHead, FlowHead
from calm_scale.lm.heads.energy.module import EnergyHead

__all__ = ["DiffusionHead", "EnergyHead", "FlowHead", "GenerativeHead", "build_head"]


def build_head(stage: LMStage, latent_size: int) -> GenerativeHead:
    """The head that ``lm.head`` describes, for hidden states of the backbone and latents of size l.

    Raises:
        ConfigError: ``softmax``, which is the autoregressive baseline's output layer and not a latent head.
    """
    head, backbone = stage.head, stage.backbone
    if isinstance(head, EnergyHeadConfig):
        return EnergyHead(
            backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            noise_size=head.noise_size,
            num_samples=head.num_samples,
            num_posterior=head.num_posterior,
            alpha=head.alpha,
            init_std=backbone.init_std,
            recompute=stage.parallel.recompute == "full",
        )
    if isinstance(head, FlowHeadConfig):
        return FlowHead(
            backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            num_repeats=head.num_repeats,
            sampling_steps=head.sampling_steps,
        )
    if isinstance(head, DiffusionHeadConfig):
        return DiffusionHead(
            backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            num_repeats=head.num_repeats,
            train_timesteps=head.train_timesteps,
            sampling_steps=head.sampling_steps,
        )
    raise ConfigError(f"lm.head.kind: {head.kind} is not a generative head over latents")
