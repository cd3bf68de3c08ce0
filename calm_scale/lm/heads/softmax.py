"""The autoregressive baseline's head without torch; its module is ``VocabularyOutput`` (``lm/token_layers.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

from calm_scale.accounting.activations import FP32, Saved, element
from calm_scale.accounting.communication import Traffic
from calm_scale.accounting.components import Component, linear
from calm_scale.config.errors import ConfigError
from calm_scale.config.lm import HeadConfig, LMStage
from calm_scale.config.run import RunConfig


class SoftmaxHeadConfig(HeadConfig):
    """The discrete autoregressive baseline: token input (K = 1), softmax output, untied embeddings."""

    predicts = "tokens"

    kind: Literal["softmax"] = "softmax"
    """The head's name."""

    def components(self, run: RunConfig, *, shared_condition: bool = True) -> Sequence[Component]:
        """The untied output projection, ``[d] → [V]``."""
        return [linear("output", "output", run.require_lm().backbone.hidden_size, run.vocab_size)]

    def kept_bytes(self, run: RunConfig, rows: int) -> Saved:
        """The projection's input, this rank's logits in fp32; their softmax and gradient pass by."""
        lm = run.require_lm()
        w, parallel = element(lm), lm.parallel
        sequence = parallel.tensor if parallel.sequence_parallel else 1
        vocabulary = -(-run.vocab_size // parallel.tensor)
        return Saved(w * lm.backbone.hidden_size / sequence + FP32 * vocabulary, (w + FP32) * vocabulary)

    def traffic(self, run: RunConfig, hidden: float, micro_batches: int) -> Sequence[Traffic]:
        """Three sums over the vocabulary for each position, and the gradient of the projection's input."""
        lm, m = run.require_lm(), micro_batches
        size, scalars = lm.parallel.tensor, FP32 * lm.training.micro_batch * lm.backbone.positions
        sums = Traffic("tensor", size, "all_reduce", "softmax sums", 3 * m, 3 * m * scalars)
        if not lm.parallel.sequence_parallel:
            return [sums, Traffic("tensor", size, "all_reduce", "output gradients", m, m * hidden)]
        return [
            sums,
            Traffic("tensor", size, "all_gather", "output", 2 * m, 2 * m * hidden),
            Traffic("tensor", size, "reduce_scatter", "output gradients", m, m * hidden),
        ]

    def build(self, stage: LMStage, latent_size: int) -> NoReturn:
        """Refuses: it has no latents.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("lm.head.kind: softmax is not a generative head over latents")
