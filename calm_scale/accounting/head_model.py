"""Components of the generative heads, per position: what depends on h alone counts once, the rest N times."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calm_scale.accounting.components import Component, linear, weights
from calm_scale.config.lm import DiffusionHeadConfig, EnergyHeadConfig, FlowHeadConfig

TIME_FEATURES = 256
"""Sinusoids of the time embedding of flow and diffusion heads."""


@lru_cache(maxsize=64)
def energy_head(
    head: EnergyHeadConfig, num_blocks: int, d: int, latent: int, *, shared_condition: bool = True
) -> tuple[Component, ...]:
    """Energy head: ε → samples ẑ ``[N, l]`` given h ``[d]``.

    ``shared_condition`` splits each block's Linear(x ‖ h) into W_x·x (per sample) and W_h·h (once per position);
    False counts the unsplit form, in which the condition is projected N times.
    """
    n = head.num_samples
    found = [
        linear("head.noise_embd", "head", head.noise_size, d, bias=True, backward=1),
        linear("head.hidden_embd", "head", d, d, bias=True),
        weights("head.norms", "head", 4 * d),
    ]
    for i in range(num_blocks):
        block = f"head.block.{i}"
        found += [
            weights(f"{block}.norm", "head", 2 * d),
            linear(f"{block}.condition", "head", d, d),
            linear(f"{block}.sample", "head", d, d, bias=True),
            linear(f"{block}.hidden", "head", d, d, bias=True),
            linear(f"{block}.gate_up", "head", d, 2 * d, bias=True),
            linear(f"{block}.down", "head", d, d, bias=True),
        ]
    found += [
        weights("head.final.norm", "head", 2 * d),
        linear("head.final.hidden", "head", d, d, bias=True),
        linear("head.final.out", "head", d, latent, bias=True),
    ]
    return tuple(c if shared_condition and _depends_on_h_alone(c) else _repeated(c, n) for c in found)


def energy_loss(head: EnergyHeadConfig, latent: int) -> list[Component]:
    """Pairwise distances of Eq. 10, l MACs each: N·M sample–target pairs, N(N − 1)/2 sample–sample pairs.

    Targets need no gradient, so the first kind pulls on one point and the second on two.
    """
    n, m = head.num_samples, head.num_posterior
    return [
        Component("loss.sample_target", "loss", 0, n * m * latent, backward=1, per_step=0),
        Component("loss.sample_sample", "loss", 0, n * (n - 1) // 2 * latent, backward=2, per_step=0),
    ]


@lru_cache(maxsize=64)
def denoiser(
    head: FlowHeadConfig | DiffusionHeadConfig, num_blocks: int, d: int, latent: int
) -> tuple[Component, ...]:
    """Flow or diffusion network: (x_t, t, h) → velocity or noise ``[l]``.

    Time is embedded by a two-layer MLP, the condition is projected once per position, and every block is
    modulated by adaLN (3 vectors a block, 2 in the final layer). A draw evaluates the network twice a midpoint
    step (flow) or once a reverse step (diffusion).
    """
    if isinstance(head, FlowHeadConfig):
        evaluations = 2 * head.sampling_steps
    else:
        evaluations = min(head.sampling_steps, head.train_timesteps)
    found = [
        linear("head.input", "head", latent, d, bias=True, backward=1),
        linear("head.time.0", "head", TIME_FEATURES, d, bias=True, backward=1),
        linear("head.time.1", "head", d, d, bias=True),
        linear("head.condition", "head", d, d, bias=True),
    ]
    for i in range(num_blocks):
        block = f"head.adaln.{i}"
        found += [
            weights(f"{block}.norm", "head", 2 * d),
            linear(f"{block}.modulation", "head", d, 3 * d, bias=True),
            linear(f"{block}.hidden", "head", d, d, bias=True),
            linear(f"{block}.out", "head", d, d, bias=True),
        ]
    found += [
        linear("head.final.modulation", "head", d, 2 * d, bias=True),
        linear("head.final.out", "head", d, latent, bias=True),
    ]
    return tuple(c if _depends_on_h_alone(c) else _repeated(c, head.num_repeats, evaluations) for c in found)


def _depends_on_h_alone(component: Component) -> bool:
    return component.name == "head.hidden_embd" or component.name.endswith(".condition")


def _repeated(component: Component, uses: int, evaluations: int = 1) -> Component:
    if component.forward == 0:
        return component
    return replace(component, uses=uses, per_step=0, per_draw=evaluations)
