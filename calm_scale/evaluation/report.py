"""An evaluation as one JSON file and one table; reading it back for a comparison."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm_scale.config.errors import ConfigError
from calm_scale.config.files import read_object, write_output
from calm_scale.config.quantities import counted
from calm_scale.evaluation.brier import ORDERS, BrierScore, Counts, EvaluationError
from calm_scale.evaluation.evaluate import EvaluationResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
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
    write_output(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


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
        score = {key: _tuples(value) for key, value in raw["score"].items()}
        protocol, execution = _object(raw, "protocol"), _object(raw, "execution")
        _object({"provenance": {}, **protocol}, "provenance")
        return EvaluationResult(BrierScore(**score), _counts(_object(raw, "documents")), protocol, execution)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise NotAnEvaluationError(f"{path} is damaged: {why}; run `calm-scale eval` again") from None


def _object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw[name]
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _counts(sums: Mapping[str, Any]) -> Counts:
    """The sums of a file, such as an evaluation can have counted.

    Raises:
        ValueError, KeyError: they are not.
    """
    num_samples = sums["num_samples"]
    if type(num_samples) is not int or num_samples < 2:
        raise ValueError(f"documents.num_samples is {num_samples!r}, not a whole number of 2 or more")
    hits, pairs, positions = (_integers(sums, name, ORDERS) for name in ("hits", "pairs", "positions"))
    ids = None if sums.get("ids") is None else _integers(sums, "ids")
    if not len(hits) == len(pairs) == len(positions) == (len(hits) if ids is None else len(ids)):
        raise ValueError("documents.hits, pairs, positions and ids differ in length")
    if ids is not None and (np.diff(ids) <= 0).any():
        raise ValueError("documents.ids do not ascend")
    most = int(positions.max(initial=0)) * num_samples**2
    if most * max(1, len(positions)) >= 2**62:
        raise ValueError("documents.num_samples or positions are beyond any evaluation")
    if (hits > num_samples * positions).any() or (
        2 * pairs > num_samples * (num_samples - 1) * positions
    ).any():
        raise ValueError("documents.hits or pairs are more than the samples of their positions")
    return Counts(hits, pairs, positions, num_samples, ids)


def _integers(sums: Mapping[str, Any], name: str, *width: int) -> NDArray[np.int64]:
    """The list ``sums[name]``, of rows of ``width`` if that is given, as int64."""
    values = np.array(sums[name])
    if values.size == 0:
        return np.zeros((0, *width), dtype=np.int64)
    if values.dtype.kind != "i" or values.shape[1:] != width or values.min() < 0:
        raise ValueError(f"documents.{name} is not a list of counts" + "".join(f", {w} a row" for w in width))
    return values.astype(np.int64)


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
