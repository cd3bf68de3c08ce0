"""What temperature sampling costs: expected draws of the exact algorithm, and FLOPs per token for N candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calm_scale.accounting.components import FLOPS_PER_MAC
from calm_scale.accounting.model_components import lm_components
from calm_scale.config.run import RunConfig

_NEARLY_WHOLE = 1e-9


def expected_draws(probabilities: Sequence[float], temperature: float) -> float:
    """Expected draws of Algorithm 1 for one patch: (n + 1[α > 0] · Σ P^{1/T − 1}) / Σ P^{1/T}, 1/T = n + α.

    Args:
        probabilities: law of the patch, sums to 1.
        temperature: 0 < T ≤ 1.
    """
    if not 0 < temperature <= 1:
        raise ValueError(f"temperature {temperature} is outside 0 < T <= 1")
    power = 1 / temperature
    whole = round(power) if abs(power - round(power)) < _NEARLY_WHOLE else math.floor(power)
    accepted = math.fsum(p**power for p in probabilities)
    tail = (
        math.fsum(p ** (power - 1) for p in probabilities if p > 0) if power - whole > _NEARLY_WHOLE else 0.0
    )
    return (whole + tail) / accepted


def expected_draws_uniform(support: int, temperature: float) -> float:
    """The same for a patch that is equally likely to be any of ``support``."""
    return expected_draws([1 / support] * support, temperature)


def per_draw(config: RunConfig) -> float:
    """FLOPs per token of one further candidate: head sample and decoder."""
    return FLOPS_PER_MAC * sum(c.forward * c.per_draw for c in lm_components(config)) / config.patch_size


def per_token(config: RunConfig, draws: float) -> float:
    """FLOPs per token when ``draws`` candidates (an expectation, need not be whole) are drawn a position."""
    step = FLOPS_PER_MAC * sum(c.forward * c.per_step for c in lm_components(config)) / config.patch_size
    return step + draws * per_draw(config)


def draws_at(config: RunConfig, flops_per_token: float) -> float:
    """How many candidates a position cost ``flops_per_token``; 0 where even one costs more."""
    left = flops_per_token - per_token(config, 0)
    return max(0.0, left / per_draw(config))
