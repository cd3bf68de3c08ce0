"""The six models of Table 1 as configurations, so that the table needs no files."""

from __future__ import annotations

from calm_scale.accounting.paper import TABLE_1
from calm_scale.config.run import RunConfig

BACKBONES: dict[str, tuple[int, int, int]] = {
    "S": (12, 768, 2048),
    "M": (16, 1024, 2752),
    "L": (16, 1536, 4096),
    "XL": (16, 2560, 6880),
}
"""Layers, width and FFN width of each size; 16 heads, 2048 positions."""


def paper_model(name: str, patch_size: int = 4) -> RunConfig:
    """One model of Table 1 by its name there, ``CALM-M`` or ``Transformer-S``."""
    family, size = name.split("-")
    layers, hidden, ffn = BACKBONES[size]
    backbone = {"num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": 16}
    training = {"steps": 250_000, "global_batch": 256}
    if family == "Transformer":
        lm = {
            "backbone": backbone,
            "head": {"kind": "softmax"},
            "training": training | {"global_batch": 1024},
        }
        return RunConfig.model_validate({"name": name, "patch_size": 1, "lm": lm})
    autoencoder = {"training": {"steps": 30_000, "global_batch": 64}}
    return RunConfig.model_validate(
        {
            "name": name,
            "patch_size": patch_size,
            "autoencoder": autoencoder,
            "lm": {"backbone": backbone, "training": training},
        }
    )


def paper_models() -> list[RunConfig]:
    """The six rows of Table 1, in the paper's order."""
    return [paper_model(row.model) for row in TABLE_1]
