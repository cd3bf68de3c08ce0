"""A tiny twin of a run: the same architecture at sizes a laptop counts in a second, and what counting it gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calm_scale.config.run import RunConfig

BATCH = 2
POSITIONS = 8


@dataclass(frozen=True)
class Comparison:
    """One quantity of the twin: FLOPs per position by our count and by torch's counter of executed operations."""

    what: str
    symbolic: int
    counted: int
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Equal to the last FLOP."""
        return self.symbolic == self.counted


def tiny_twin(config: RunConfig) -> RunConfig:
    """The run at tiny widths on one rank: same K, head, input mode, N, recomputation and grouping of heads."""
    lm, document = config.require_lm(), config.model_dump()
    group = lm.backbone.num_heads // lm.backbone.query_groups
    heads = 2 * group
    backbone: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8 * heads,
        "ffn_size": 24,
        "num_heads": heads,
        "num_query_groups": 2,
        "positions": POSITIONS,
    }
    document["lm"]["backbone"] |= backbone
    document["lm"]["parallel"] = {"recompute": lm.parallel.recompute}
    document["lm"]["training"] |= {"global_batch": BATCH, "micro_batch": BATCH, "precision": "fp32"}
    head = document["lm"]["head"]
    head |= {key: min(head[key], limit) for key, limit in (("num_posterior", 5),) if key in head}
    head |= {"num_blocks": 2} if "num_blocks" in head else {}
    document |= {"name": "twin", "vocab_size": 64, "prep": None}
    if document["autoencoder"] is not None:
        document["autoencoder"]["model"] |= {"hidden_size": 16, "ffn_size": 24, "latent_size": 12}
        document["autoencoder"]["zero"] = {}
        document["autoencoder"]["training"] |= {"global_batch": BATCH, "micro_batch": BATCH}
    return RunConfig.model_validate(document)
