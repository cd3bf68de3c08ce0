"""An evaluation as one JSON file and one table; reading it back for a comparison."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm_scale.config.base import ConfigError
from calm_scale.config.files import write_atomically
from calm_scale.config.stored import read_object
from calm_scale.config.wording import counted
from calm_scale.evaluation.brier import ORDERS, BrierScore, Counts, EvaluationError
from calm_scale.evaluation.evaluate import EvaluationResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from calm_scale.evaluation.exact import ExactScore

FORMAT = "calm-scale evaluation 1"
_FEW_DOCUMENTS = 20


class NotAnEvaluationError(EvaluationError, ConfigError):
    """A file that was given as an evaluation and is none."""


def to_document(result: EvaluationResult) -> dict[str, Any]:
    """The JSON document of a result. All but ``execution`` is a function of model, data and protocol."""
    counts = result.counts
    return {
        "format": FORMAT,
        "score": asdict(result.score),
        "protocol": dict(result.protocol),
        "execution": dict(result.execution),
        "documents": {
            "num_samples": counts.num_samples,
            "ids": None if counts.ids is None else counts.ids.tolist(),
            "hits": counts.hits.tolist(),
            "pairs": counts.pairs.tolist(),
            "positions": counts.positions.tolist(),
        },
    }


def save(result: EvaluationResult, path: Path) -> None:
    """Writes the JSON document; a reader never sees half of it, and a failure leaves nothing."""
    _write(to_document(result), path)


def save_exact(score: ExactScore, protocol: Mapping[str, Any], path: Path) -> None:
    """Writes exact scores, their numbers at the top and ``protocol`` under its name, as ``save`` writes."""
    _write({**asdict(score), "protocol": dict(protocol)}, path)


def _write(document: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def load(path: Path) -> EvaluationResult:
    """Reads what ``save`` wrote.

    Raises:
        NotAnEvaluationError: not an evaluation of this format, or a damaged one.
    """
    remedy = "give the JSON that `calm-scale eval` wrote"
    raw = read_object(path, remedy=remedy, raises=NotAnEvaluationError)
    if raw.get("format") != FORMAT:
        raise NotAnEvaluationError(f"{path} is not a '{FORMAT}' file; {remedy}")
    try:
        sums = raw["documents"]
        hits, pairs, positions = (
            np.array(sums[name], dtype=np.int64).reshape(-1, ORDERS)
            for name in ("hits", "pairs", "positions")
        )
        score = {key: _tuples(value) for key, value in raw["score"].items()}
        ids = sums.get("ids")
        counts = Counts(
            hits,
            pairs,
            positions,
            sums["num_samples"],
            None if ids is None else np.array(ids, dtype=np.int64),
        )
        return EvaluationResult(BrierScore(**score), counts, dict(raw["protocol"]), dict(raw["execution"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise NotAnEvaluationError(f"{path} is damaged: {why}; run `calm-scale eval` again") from None


def table(result: EvaluationResult, title: str = "BrierLM") -> Table:
    """Components (in per cent), composite, intervals and the protocol, for the terminal."""
    from rich.table import Table

    score = result.score
    out = Table(title=title, caption=_caption(result), caption_justify="left")
    for name in ("", "score", f"{score.confidence:.0%} interval", "accuracy", "collision", "positions"):
        out.add_column(name, justify="left" if not name else "right")
    for n in range(len(score.components)):
        out.add_row(
            f"Brier-{n + 1} (%)",
            _percent(score.components[n]),
            _range(score.component_intervals[n], 100.0),
            _percent(score.accuracy[n]),
            _percent(score.collision[n]),
            f"{score.num_positions[n]:,}",
        )
    out.add_section()
    out.add_row(
        "BrierLM",
        "n/a" if score.brierlm is None else f"{score.brierlm:z.3f}",
        _range(score.brierlm_interval, 1.0),
    )
    return out


def _caption(result: EvaluationResult) -> str:
    p, score = result.protocol, result.score
    lines = [f"BrierLM is undefined: {score.undefined_because}"] if score.undefined_because else []
    if 1 < score.num_documents < _FEW_DOCUMENTS:
        lines.append(
            f"the intervals rest on {score.num_documents} documents only: take them as a rough guide"
        )
    lines += [
        f"K {p['patch_size']}, {p['num_sequences']} sequences of {p['block_tokens']} tokens, "
        f"{counted(score.num_documents, 'document')} (by {p['documents_by']}), S {score.num_samples}, "
        f"seed {p['seed']}, sampler {p['sampler']}, {counted(result.execution.get('ranks', 1), 'rank')}",
        f"covers {p['covers']}",
        f"left out: {p['sequences_left_out']} sequences, {p['dropped_tail_tokens']} tokens of tail; "
        f"{p.get('partial_sequences', 0)} partial sequences scored as far as they go",
    ]
    draws = result.execution.get("draws")
    if draws and p.get("temperature") != 1:
        lines.append(
            f"{draws['draws']:,} draws for {draws['patches']:,} patches, {counted(draws['fallbacks'], 'fall-back')}"
        )
    lines += [f"{name}: {value}" for name, value in p["provenance"].items()]
    return "\n".join(lines)


def fallback_warning(result: EvaluationResult) -> str | None:
    """What to tell about an evaluation some of whose patches were not drawn by the rule that was asked for."""
    draws = result.execution.get("draws") or {}
    if not draws.get("fallbacks"):
        return None
    return (
        f"warning: {draws['fallbacks']:,} of {draws['patches']:,} patches fell back: they are not drawn at the "
        f"temperature asked for ({result.protocol['sampler']}); raise evaluation.num_candidates (Algorithm 2), "
        "evaluation.draw_budget (Algorithm 1) or evaluation.temperature"
    )


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:z.3f}"


def _range(interval: tuple[float | None, float | None] | None, scale: float) -> str:
    if interval is None:
        return "n/a"
    return " – ".join("n/a" if end is None else f"{scale * end:z.3f}" for end in interval)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
