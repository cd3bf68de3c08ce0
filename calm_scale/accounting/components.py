"""A model as a list of components: parameters and multiply-accumulates, nothing else.

One component is one matrix product (or a group of equal ones). All counts are *per position*: a position is one
autoregressive step, which is one patch of K tokens (K = 1 for the AR baseline and one patch for the autoencoder).
Only multiply-accumulates of matrix products are counted (1 MAC = 2 FLOPs); look-ups, norms, activations and
softmax are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Split = Literal["none", "columns", "rows"]
Part = Literal["embedding", "input", "backbone", "output", "head", "loss", "encoder", "decoder"]

FLOPS_PER_MAC = 2


@dataclass(frozen=True)
class Component:
    """One matrix product of the model.

    Attributes:
        name: dotted path, ``layer.3.attention.qkv``.
        part: the room of the model it belongs to.
        parameters: weights and biases it owns.
        forward: MACs of one use at one position (attention counted full, not causal).
        uses: forward uses per position while training (N for what depends on the sample, 1 for what is shared).
        backward: MACs of the backward pass as a multiple of ``forward``: 2 (weights and input), 1 (the input
            needs no gradient, or there are no weights on one side), 0 (frozen).
        per_step: uses per position while generating, whatever the number of candidates.
        per_draw: uses per position *and candidate* while generating.
        attention: True for the score and value products, which a causal kernel halves.
        num_in: inner width of the product, 0 where there is none.
        num_out: its outer width.
        rows: vectors it is applied to at one position and use.
        split: how tensor-parallel ranks share it where the head's weights are split: by output columns, by input
            rows (the bias stays whole), or not.
        recomputed: part of a head's block that ``recompute: full`` runs again; layers always are.
    """

    name: str
    part: Part
    parameters: int = 0
    forward: int = 0
    uses: int = 1
    backward: int = 2
    per_step: int = 1
    per_draw: int = 0
    attention: bool = False
    num_in: int = 0
    num_out: int = 0
    rows: int = 1
    split: Split = "none"
    recomputed: bool = False

    @property
    def training_forward(self) -> int:
        """Forward MACs per position and training step."""
        return self.forward * self.uses

    @property
    def training_backward(self) -> int:
        """Backward MACs per position and training step."""
        return self.forward * self.uses * self.backward

    @property
    def training(self) -> int:
        """Forward and backward MACs per position and training step."""
        return self.training_forward + self.training_backward

    def inference(self, num_draws: int = 1) -> int:
        """MACs per generated position when ``num_draws`` candidates are drawn for it."""
        return self.forward * (self.per_step + self.per_draw * num_draws)


def linear(
    name: str,
    part: Part,
    num_in: int,
    num_out: int,
    *,
    bias: bool = False,
    rows: int = 1,
    backward: int = 2,
    split: Split = "none",
    recomputed: bool = False,
) -> Component:
    """A linear map ``num_in → num_out`` applied to ``rows`` vectors per position."""
    parameters = num_in * num_out + (num_out if bias else 0)
    return Component(
        name,
        part,
        parameters,
        rows * num_in * num_out,
        backward=backward,
        num_in=num_in,
        num_out=num_out,
        rows=rows,
        split=split,
        recomputed=recomputed,
    )


def weights(name: str, part: Part, parameters: int) -> Component:
    """Parameters without matrix products: norms, look-up tables."""
    return Component(name, part, parameters, forward=0, backward=0, per_step=0)


def parameters_of(components: Iterable[Component]) -> int:
    """Sum of the parameters."""
    return sum(component.parameters for component in components)


def by_part(components: Iterable[Component]) -> dict[Part, list[Component]]:
    """The components grouped by part, in order of first appearance."""
    parts: dict[Part, list[Component]] = {}
    for component in components:
        parts.setdefault(component.part, []).append(component)
    return parts


def causal(components: Iterable[Component], positions: int) -> list[Component]:
    """The same components with attention counted causally: query i meets i + 1 keys, (P + 1) / 2 on average.

    Attention MACs of one position are 2 · P · d, so the halved count is the integer (P + 1) · d.
    """
    return [
        replace(c, forward=c.forward * (positions + 1) // (2 * positions)) if c.attention else c
        for c in components
    ]


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
