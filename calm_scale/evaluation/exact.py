"""The autoregressive baseline scored with its probabilities: cross-entropy, and Brier-n without sampling the truth.

With p(v | x) at hand the hit term 2P(y) is exact, Π_j p(y_j | true prefix). The collision term Σ_x P(x)² is exact
for n = 1; for n > 1 it is Σ_x<n P(x<n)² Σ_v p(v | x<n)², of which the last factor is exact and the prefixes are
sampled pairs: 1{x<n = x'<n} · Σ_v p(v | x<n)², averaged over all pairs of S samples. Unbiased, and with less
variance than counting tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calm_scale.evaluation.brier import ORDERS, EvaluationError
from calm_scale.evaluation.evaluate import protocol_of
from calm_scale.evaluation.paths import Level, roll_forward, true_windows
from calm_scale.evaluation.sequences import Grid, TokenBlocks, deal, gather, grids, selected
from launchers.ranks import Alone, Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from calm_scale.config.evaluation import EvaluationConfig
    from calm_scale.lm.patch_model import TokenModel

_OF_THE_SEQUENCES = (
    "patch_size",
    "vocab_size",
    "block_tokens",
    "num_sequences",
    "partial_sequences",
    "sequences_left_out",
    "dropped_tail_tokens",
    "num_samples",
    "exact_batches",
    "seed",
)
_LAW_ELEMENTS = 1 << 25  # float64 probabilities alive at once


@dataclass(frozen=True)
class ExactScore:
    """Cross-entropy in nats a token and Brier-n, means over every token with n true tokens from it on.

    ``brierlm`` is None unless all four components are positive.
    """

    cross_entropy: float
    components: tuple[float, ...]
    brierlm: float | None
    num_positions: tuple[int, ...]
    num_samples: int

    @property
    def perplexity(self) -> float:
        """exp of the cross-entropy."""
        return math.exp(self.cross_entropy)


def evaluate_exact(
    model: TokenModel, dataset: TokenBlocks, config: EvaluationConfig, *, crew: Ranks | None = None
) -> ExactScore:
    """Scores every token of the sequences but the first.

    Raises:
        EvaluationError: a patch model, an empty split, or another rank's failure.
    """
    if model.patch_size != 1 or not hasattr(model, "log_probs"):
        raise EvaluationError(
            f"exact scores need the baseline's token probabilities; a patch model (K = {model.patch_size}) has none"
        )
    crew = crew or Alone()
    if len(dataset) == 0:
        raise EvaluationError("no sequence to evaluate: the split is empty. Prepare a held-out split first")

    mine = deal(selected(len(dataset), config.max_sequences), crew)

    def work() -> list[tuple[int, list[float], list[int]]]:
        with torch.no_grad():
            return [
                (index, *_sequence_sums(model, only, config, index))
                for index, _, (only, *_) in grids(model, dataset, mine, config)
            ]

    ordered = sorted(gather(work, crew))
    sums = [math.fsum(values[i] for _, values, _ in ordered) for i in range(ORDERS + 1)]
    positions = [sum(counts[i] for _, _, counts in ordered) for i in range(ORDERS)]
    components = tuple(s / max(1, p) for s, p in zip(sums[1:], positions, strict=True))
    positive = all(c > 0 for c in components)
    return ExactScore(
        cross_entropy=sums[0] / max(1, positions[0]),
        components=components,
        brierlm=100 * math.prod(components) ** (1 / ORDERS) if positive else None,
        num_positions=tuple(positions),
        num_samples=config.num_samples,
    )


def exact_protocol(
    model: TokenModel, dataset: TokenBlocks, config: EvaluationConfig, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that ``evaluate_exact`` depends on, in words and numbers; the sequences as in ``protocol_of``.

    The law is the model's own: ``config.temperature`` does not change it.
    """
    sampled = protocol_of(model, dataset, config, selected(len(dataset), config.max_sequences))
    return {
        **{name: sampled[name] for name in _OF_THE_SEQUENCES},
        "metric": "cross-entropy in nats a token; Brier-n from probabilities, collisions over sampled prefixes",
        "temperature": 1.0,
        "provenance": dict(provenance),
    }


def _sequence_sums(
    model: TokenModel, grid: Grid, config: EvaluationConfig, index: int
) -> tuple[list[float], list[int]]:
    """[Σ −log p, Σ Brier-1, …, Σ Brier-4] of one sequence, and the numbers of positions."""
    truth, valid, _ = true_windows(grid.tokens, 1)
    num_targets = len(truth)
    pieces = torch.arange(num_targets, device=grid.tokens.device).split(_rows_at_once(model))
    log_p = torch.cat(
        [_log_p_of_truth(model, grid, part) for part in pieces] or [truth.new_empty(0).double()]
    )
    hits = torch.nn.functional.pad(log_p, (0, ORDERS - 1)).unfold(0, ORDERS, 1).cumsum(-1).exp()
    collisions = torch.zeros(num_targets, ORDERS, dtype=torch.float64, device=log_p.device)

    def watch(t: int, paths: Tensor, level: Level) -> None:
        squares = [_sum_of_squares(model, part) for part in level.hidden.split(_rows_at_once(model))]
        of_row = torch.cat(squares)
        for s in range(len(paths) - 1):
            equal = (paths[s] == paths[s + 1 :]).all(-1) & level.alive[s] & level.alive[s + 1 :]
            collisions[:, t] += equal.sum(0) * of_row[level.row[s]]

    if num_targets:
        key = (config.seed, index, "exact")
        for _ in roll_forward(model, grid.tokens, grid.hidden, config.num_samples, key, watch):
            pass
    pairs = config.num_samples * (config.num_samples - 1) / 2
    brier = torch.where(valid, 2 * hits - collisions / pairs, 0.0).sum(0)
    return [float(-log_p.sum()), *brier.tolist()], valid.sum(0).tolist()


def _log_p_of_truth(model: TokenModel, grid: Grid, positions: Tensor) -> Tensor:
    """log p(true next token) after each of these positions, float64."""
    law = model.log_probs(grid.hidden[positions]).double()
    return law.gather(-1, grid.tokens[positions + 1, None])[:, 0]


def _sum_of_squares(model: TokenModel, hidden: Tensor) -> Tensor:
    """Σ_v p(v | h)² of each row, float64."""
    return (2 * model.log_probs(hidden).double()).exp().sum(-1)


def _rows_at_once(model: TokenModel) -> int:
    return max(1, _LAW_ELEMENTS // model.vocab_size)
