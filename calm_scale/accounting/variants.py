"""The same backbone with another patch size, or as its own autoregressive baseline."""

from __future__ import annotations

from calm_scale.accounting.backbone_model import is_autoregressive, lm_of
from calm_scale.accounting.costs import token_costs
from calm_scale.config.run import RunConfig


def with_patch_size(config: RunConfig, patch_size: int) -> RunConfig:
    """The run with K = ``patch_size``, latent size 32 · K and the same number of positions.

    An AR baseline becomes a CALM with the default head on its backbone.
    """
    document = config.model_dump()
    document |= {"name": f"{config.name}-k{patch_size}", "patch_size": patch_size, "prep": None}
    if is_autoregressive(config):
        document["lm"]["head"] = {"kind": "energy"}
    if document["autoencoder"] is not None:
        document["autoencoder"]["model"]["latent_size"] = None
    return RunConfig.model_validate(document)


def baseline_of(config: RunConfig, hidden_size: int | None = None) -> RunConfig:
    """The AR baseline on the same backbone: tokens in, softmax out, P tokens of context.

    ``hidden_size`` replaces the width; the FFN width follows in proportion.
    """
    document = config.model_dump()
    backbone = document["lm"]["backbone"]
    if hidden_size is not None:
        ratio = backbone["ffn_size"] / backbone["hidden_size"]
        step = backbone["num_heads"]
        backbone |= {"hidden_size": hidden_size, "ffn_size": step * max(1, round(hidden_size * ratio / step))}
    document |= {"name": f"{config.name}-baseline", "patch_size": 1, "prep": None, "autoencoder": None}
    document["lm"] |= {"head": {"kind": "softmax"}, "input_mode": "discrete", "parallel": {}}
    return RunConfig.model_validate(document)


def baseline_at(config: RunConfig, flops_per_token: float) -> RunConfig:
    """The AR baseline of the same depth whose training costs ``flops_per_token``, as near as its width allows."""
    # An even head dimension, as rotary embeddings need it.
    step = 2 * lm_of(config).backbone.num_heads
    low, high = 1, 1 << 16

    def cost(units: int) -> float:
        return token_costs(baseline_of(config, units * step)).training

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= flops_per_token else (low, middle)
    nearest = min((low, high), key=lambda units: abs(cost(units) - flops_per_token))
    return baseline_of(config, nearest * step)
