"""The paper's Table 1, as printed there, and the amounts of data behind it."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_TOKENS = 500_000_000_000
"""250k steps of 2M tokens."""

AUTOENCODER_TOKENS = 15_360_000_000
"""30k steps of 512k tokens."""


@dataclass(frozen=True)
class PaperRow:
    """One row of Table 1: parameters, training FLOPs, inference FLOPs per token, BrierLM."""

    model: str
    parameters: float
    training: float
    inference: float
    brierlm: float


TABLE_1: tuple[PaperRow, ...] = (
    PaperRow("Transformer-S", 281e6, 6.6e20, 4.4e8, 6.05),
    PaperRow("Transformer-M", 465e6, 11.9e20, 7.9e8, 7.07),
    PaperRow("Transformer-L", 849e6, 22.5e20, 15.0e8, 8.98),
    PaperRow("CALM-M", 371e6, 3.7e20, 2.9e8, 5.72),
    PaperRow("CALM-L", 735e6, 7.7e20, 4.6e8, 6.58),
    PaperRow("CALM-XL", 1.82e9, 19.5e20, 9.4e8, 8.53),
)
