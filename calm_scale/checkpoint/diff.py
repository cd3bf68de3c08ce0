"""May this run go on from that checkpoint? A field-by-field answer, without torch and before any node is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from calm_scale.checkpoint.card import Card
from calm_scale.checkpoint.errors import ResumeRefusedError
from calm_scale.config import RunConfig
from calm_scale.config.fields import policy_of
from calm_scale.config.run_folder import TRAINED
from calm_scale.config.section import RESUME_WORDS, Resume

Verdict = Literal["same"] | Resume

_WORDS: Mapping[Verdict, str] = {
    "same": "same",
    "safe": f"{RESUME_WORDS['safe']}: applied",
    "results": RESUME_WORDS["results"],
    "forbidden": RESUME_WORDS["forbidden"],
}
_IDENTITY = ("stage", "tokenizer")
"""What the card says besides the configuration and its fingerprints; `tokenizer` stands for the tokenizers' ids."""


@dataclass(frozen=True)
class FieldChange:
    """One field that differs."""

    field: str
    old: Any
    new: Any
    verdict: Verdict
    reason: str = ""

    def answer(self, accept: Iterable[str] = ()) -> str:
        """The verdict in words, with its reason. ``accept``: the fields that were accepted."""
        accepted = self.verdict == "results" and self.field in accept
        words = "changes results: accepted" if accepted else _WORDS[self.verdict]
        return f"{words}: {self.reason}" if self.reason else words

    def text(self, accept: Iterable[str] = ()) -> str:
        """The change and its verdict in one line."""
        return f"{self.field}: {self.old!r} → {self.new!r}  ({self.answer(accept)})"


@dataclass(frozen=True)
class ResumeDiff:
    """Everything that differs between a checkpoint and the run that wants to go on from it."""

    changes: tuple[FieldChange, ...]
    num_same: int

    def of(self, verdict: Verdict) -> tuple[FieldChange, ...]:
        """The changes with this verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)

    def refused(self, accept: Iterable[str] = ()) -> tuple[FieldChange, ...]:
        """The changes that stand in the way: forbidden ones, and unaccepted ones that change results."""
        accepted = set(accept)
        return self.of("forbidden") + tuple(c for c in self.of("results") if c.field not in accepted)

    def check(self, accept: Sequence[str] = ()) -> None:
        """Raises ResumeRefusedError that shows every field standing in the way and what to do."""
        refused = self.refused(accept)
        unknown = [field for field in accept if field not in {change.field for change in self.changes}]
        if not refused:
            return
        lines = [f"  {change.text()}" for change in refused]
        hints = " ".join(f"--accept {change.field}" for change in refused if change.verdict == "results")
        if hints:
            lines.append(f"To go on with changed results: {hints}")
        if unknown:
            lines.append(f"--accept names what did not change: {', '.join(unknown)}")
        if any(change.verdict == "forbidden" and not change.reason for change in refused):
            lines.append("A forbidden change is another run: give it another name or workdir")
        raise ResumeRefusedError("this run cannot go on from that checkpoint:\n" + "\n".join(lines))


def resume_diff(
    card: Card, config: Mapping[str, Any], stage: str, fingerprints: Mapping[str, str | None] | None = None
) -> ResumeDiff:
    """Compares a card with the resolved document (``RunConfig.model_dump(mode="json")``) of the run to resume.

    ``fingerprints`` holds those of tokenizer, shards and autoencoder (``Identity.fingerprints``) that are seen: on a
    machine without the data only the configuration is compared. A changed ``tokenizer.*`` is safe where the tokenizer
    it names now has the fingerprint of the card's: it is loaded for that, and only then.
    """
    old, new = _flat(card.config), _flat(config)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if _concerns(name, stage)
    }
    pairs["stage"] = (card.stage, stage)
    for name, value in (fingerprints or {}).items():
        pairs[name] = (card.fingerprints[name], value)
    tokenizers = _tokenizers(card, pairs, config)
    if tokenizers is not None:
        pairs["tokenizer"] = tokenizers
    another_tokenizer = tokenizers is not None and tokenizers[0] != tokenizers[1]
    changes = [
        FieldChange(name, a, b, _verdict(name, config, another_tokenizer=another_tokenizer))
        for name, (a, b) in pairs.items()
        if a != b
    ]
    changes = [_refuse_fewer_steps(change, stage, card.step) for change in changes]
    order = ("forbidden", "results", "safe")
    changes.sort(key=lambda change: (order.index(change.verdict), change.field))
    return ResumeDiff(tuple(changes), len(pairs) - len(changes))


def _concerns(name: str, stage: str) -> bool:
    """The other stage's section is judged by its fingerprint, not by its settings."""
    section = name.partition(".")[0]
    return section == stage or section not in TRAINED


def _tokenizers(
    card: Card, pairs: Mapping[str, tuple[Any, Any]], config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The fingerprints of the card's tokenizer and of the one named now (or why it has none), where a setting that
    can make them differ has changed. An imported run may not know its tokenizer."""
    names = (name for name, (a, b) in pairs.items() if a != b and name.startswith("tokenizer."))
    if not card.tokenizer_fingerprint or not any(policy_of(name).prep for name in names):
        return None
    from data_prep.tokenizer import load_tokenizer

    run = RunConfig.model_validate(config)
    try:
        return card.tokenizer_fingerprint, load_tokenizer(run.tokenizer, run.tokenizer_path).fingerprint
    except Exception as error:  # a broken file, in one of many words: it is not the run's tokenizer
        return card.tokenizer_fingerprint, f"cannot be loaded: {error}"


def _verdict(name: str, config: Mapping[str, Any], *, another_tokenizer: bool) -> Verdict:
    if name in _IDENTITY or name.endswith("_fingerprint"):
        return "forbidden"
    section, _, field = name.partition(".")
    policy = policy_of(name, config)
    if section == "tokenizer" and policy.prep and another_tokenizer:
        return "forbidden"
    if field == "training.steps":
        kind = _flat(config).get(f"{section}.training.optimizer.schedule.kind")
        return "safe" if kind == "constant" else "results"
    return policy.resume or "results"


def _refuse_fewer_steps(change: FieldChange, stage: str, done: int) -> FieldChange:
    """Fewer steps than the checkpoint has done cannot be trained."""
    if change.field != f"{stage}.training.steps" or not isinstance(change.new, int) or change.new >= done:
        return change
    return replace(change, verdict="forbidden", reason=f"{done} steps are done already; give {done} or more")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {
            name: leaf
            for key, inner in value.items()
            for name, leaf in _flat(inner, f"{prefix}{key}.").items()
        }
    return {prefix.removesuffix("."): list(value) if isinstance(value, tuple) else value}
