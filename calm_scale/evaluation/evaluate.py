"""BrierLM of a model on tokenized sequences, with the protocol it was measured under."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from calm_scale.evaluation.brier import ORDERS, BrierScore, Counts, EvaluationError, score
from calm_scale.evaluation.paths import Windows, sample_windows
from calm_scale.evaluation.sequences import (
    Grid,
    SequenceCounts,
    Teams,
    TokenBlocks,
    bos_between,
    count_sequence,
    deal,
    gather,
    grids,
    merge,
    selected,
)
from calm_scale.lm.patch_model import CountedSampler
from launchers.ranks import Alone, Ranks

if TYPE_CHECKING:
    from calm_scale.config.evaluation import EvaluationConfig
    from calm_scale.lm.patch_model import PatchModel


@dataclass(frozen=True)
class EvaluationResult:
    """A score that can be compared: the numbers, the protocol behind them, and their sums per document.

    ``protocol`` holds all that the numbers depend on; ``execution`` what they do not (ranks, batch, seconds) and what
    they cost: of a tempered model ``draws``, that is ``patches``, model ``draws`` and ``fallbacks`` over all ranks.
    """

    score: BrierScore
    counts: Counts
    protocol: Mapping[str, Any]
    execution: Mapping[str, Any] = field(default_factory=dict)


def evaluate(
    model: PatchModel,
    dataset: TokenBlocks,
    config: EvaluationConfig,
    *,
    bos_id: int | None = None,
    pad_id: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    crew: Ranks | None = None,
    on_sequence: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Scores every patch boundary of the sequences from samples of the model.

    Args:
        model: any law of patches; its temperature, if it has one, is named by its ``sampler`` attribute, and its
            draws are counted by its ``tally``.
        dataset: sequences of token ids; the last partial patch of a sequence is scored as far as it goes.
        config: the protocol.
        bos_id: begins a document (for the bootstrap); without BOS in the data a sequence is a document.
        pad_id: positions whose true continuation holds this id are not scored for that order.
        provenance: names of what was scored (fingerprints of data, autoencoder, checkpoint); goes into the result.
        crew: ranks (or tensor-parallel teams of ranks) that share the sequences. Every rank gets the whole result.
        on_sequence: called with (done, of) on this rank.

    Raises:
        EvaluationError: nothing to score, ids outside of the vocabulary, or another rank's failure.
    """
    crew = crew or Alone()
    if len(dataset) == 0:
        raise EvaluationError("no sequence to evaluate: the split is empty. Prepare a held-out split first")
    started = time.perf_counter()
    indices = selected(len(dataset), config.max_sequences)
    mine = deal(indices, crew)

    def work() -> list[SequenceCounts]:
        done = []
        with torch.no_grad():
            for index, tokens, sequence_grids in grids(model, dataset, mine, config):
                before = _tally(model)
                windows = [(g.shift, _windows(model, g, index, config, pad_id)) for g in sequence_grids]
                detached = bos_between(dataset, indices, index, bos_id)
                counted = count_sequence(index, tokens, windows, bos_id, detached)
                done.append(replace(counted, draws=_since(before, _tally(model))))
                if on_sequence is not None:
                    on_sequence(len(done), len(mine))
        return done

    sequences = gather(work, crew)
    counts, documents_by = merge(sequences, config.num_samples)
    if not counts.positions.any():
        raise EvaluationError(
            f"nothing was scored: none of {len(indices)} sequences has a token that is not padding after its first "
            f"patch of {model.patch_size}. Prepare more text for the split"
        )
    protocol = {
        **protocol_of(model, dataset, config, indices),
        "num_documents": counts.num_documents,
        "documents_by": documents_by,
        "provenance": dict(provenance or {}),
    }
    tensor = crew.tensor if isinstance(crew, Teams) else 1
    execution = {
        "ranks": crew.world_size * tensor,
        "tensor_parallel": tensor,
        "batch_size": config.batch_size,
        "seconds": time.perf_counter() - started,
        **_draws(sequences),
    }
    return EvaluationResult(
        score(counts, config.bootstrap, config.confidence, config.seed), counts, protocol, execution
    )


def protocol_of(
    model: PatchModel, dataset: TokenBlocks, config: EvaluationConfig, indices: Sequence[int]
) -> dict[str, Any]:
    """Everything a BrierLM depends on, in words and numbers."""
    k = model.patch_size
    lengths = [len(dataset[i]) for i in indices]
    offsets = list(range(k)) if config.coverage == "all" else [0]
    return {
        "metric": "BrierLM, U-statistic over all pairs of samples",
        "patch_size": k,
        "vocab_size": model.vocab_size,
        "block_tokens": max(lengths),
        "num_sequences": len(indices),
        "partial_sequences": sum(length < max(lengths) for length in lengths),
        "num_samples": config.num_samples,
        "sampler": model.sampler if isinstance(model, CountedSampler) else "plain, T = 1",
        "temperature": model.temperature if isinstance(model, CountedSampler) else 1.0,
        "coverage": config.coverage,
        "scored_offsets": offsets,
        "covers": (
            f"the 4 tokens after a true prefix, starting at {len(offsets)} of {k} token offsets of the patch grid"
            + (f"; paths run over {-(-ORDERS // k)} patches" if k < ORDERS else "")
        ),
        "sequences_left_out": len(dataset) - len(indices),
        "dropped_tail_tokens": _tail_of(dataset),
        "exact_batches": config.exact_batches,
        "seed": config.seed,
        "bootstrap": f"{config.bootstrap} resamplings of documents, {config.confidence:.0%} percentile interval",
    }


def _tail_of(dataset: TokenBlocks) -> int:
    """Tokens behind the last sequence that the data set does not hold (prep was told to drop them); else 0."""
    tokens = getattr(getattr(dataset, "manifest", None), "tokens", None)
    return int(getattr(tokens, "tail", 0))


def _tally(model: PatchModel) -> tuple[int, ...] | None:
    """Patches, draws and fall-backs counted so far, by a model that counts them."""
    return astuple(model.tally) if isinstance(model, CountedSampler) else None


def _since(before: tuple[int, ...] | None, now: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    if before is None or now is None:
        return None
    patches, draws, fallbacks = (b - a for a, b in zip(before, now, strict=True))
    return patches, draws, fallbacks


def _draws(sequences: Sequence[SequenceCounts]) -> dict[str, dict[str, int]]:
    """The sums of all sequences' draws, under ``draws``; nothing from a model that does not count them."""
    counted = [s.draws for s in sequences if s.draws is not None]
    if not counted:
        return {}
    names = ("patches", "draws", "fallbacks")
    return {"draws": {name: sum(of) for name, of in zip(names, zip(*counted, strict=True), strict=True)}}


def _windows(
    model: PatchModel, grid: Grid, index: int, config: EvaluationConfig, pad_id: int | None
) -> Windows:
    windows = sample_windows(
        model, grid.tokens, grid.hidden, config.num_samples, (config.seed, index, grid.shift)
    )
    if pad_id is None:
        return windows
    return Windows(windows.samples, windows.truth, windows.valid & (windows.truth != pad_id), windows.start)
