"""BrierLM and generation settings, and the protocol under which a checkpoint was scored.

A BrierLM depends on its protocol, so two scores under different ones are different quantities: they have different
files and are never shown as one series.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from calm_scale.config.section import SAFE, Section, Seed

Temperature = Annotated[float, Field(gt=0, le=1)]


class EvaluationConfig(Section):
    """Protocol of a BrierLM evaluation; it is part of the reported result."""

    field_policy = SAFE

    split: Literal["heldout", "train"] = "heldout"
    """The prepared split that is scored."""
    text: str | None = None
    """Name of the split's text, such as `wikitext-103`; reports show the scores of different texts apart."""
    max_sequences: int | None = Field(default=None, gt=0)
    """Number of sequences scored, evenly spaced over the split; null scores all."""
    num_samples: int = Field(default=2, ge=2)
    """Samples drawn at each position."""
    coverage: Literal["first", "all"] = "first"
    """Tokens scored: those after each patch boundary, or every token by a pass on each of the K shifted grids."""
    temperature: Temperature = 1.0
    """Temperature of the sampler; below 1 with `algorithm`."""
    algorithm: Literal["exact", "batch", "law", "noise_scale", "shrink"] = "batch"
    """Sampler below temperature 1: Algorithm 1 (exact), 2 (batch of candidates), the law itself, or one nearer draw.

    `law` draws from the tempered law, which the atoms head states. The last two have no exact law; `temperature` is the
    scale of the head's noise (`noise_scale`), or of a latent's distance from the mean of `num_candidates` latents
    (`shrink`).
    """
    num_candidates: int = Field(default=200, ge=1)
    """Candidates of Algorithm 2, or latents of the mean of `shrink`, at each position."""
    draw_budget: int = Field(default=10_000, ge=1)
    """Most draws of Algorithm 1 at each position."""
    batch_size: int = Field(default=8, gt=0)
    """Sequences read at once."""
    exact_batches: bool = True
    """Run one sequence a forward pass: scores equal to the last digit for every `batch_size`."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that hold one model, where it is too large for one device."""
    bootstrap: int = Field(default=1000, ge=100)
    """Resamples of the confidence interval."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the confidence interval."""
    seed: Seed = 0
    """Seed of the samples."""


class GenerationConfig(Section):
    """Likelihood-free temperature sampling: Algorithm 1 (exact), 2 (batch of candidates), or one nearer draw."""

    field_policy = SAFE

    algorithm: Literal["plain", "exact", "batch", "law", "noise_scale", "shrink"] = "batch"
    """Draw at temperature 1 (plain), by Algorithm 1 (exact), 2 (batch of candidates), from the law, or nearer draws.

    `law` draws from the tempered law, which the atoms head states. For nearer draws `temperature` scales the noise
    (`noise_scale`) or the distance from the mean of `num_candidates` latents (`shrink`).
    """
    temperature: Temperature = 0.5
    """Temperature of the sampler; may be a fraction such as `1/3`."""
    num_candidates: int = Field(default=200, ge=1)
    """Candidates of Algorithm 2, and draws tried for a prompt that ends inside a patch."""
    draw_budget: int = Field(default=10_000, ge=1)
    """Most draws of Algorithm 1 for one patch; beyond, it falls back to Algorithm 2 and says so."""
    max_new_tokens: int = Field(default=128, gt=0)
    """Tokens generated for each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a generation."""
    batch_size: int = Field(default=16, gt=0)
    """Prompts generated at once."""
    seed: Seed = 0
    """Seed of the draws."""


PAPER_TEXT = "wikitext-103"
"""``evaluation.text`` of the text that the paper's Table 1 is measured on."""


def protocol_name(document: Mapping[str, Any]) -> str:
    """The protocol of a resolved document, such as ``first-S2-T0.5-batch-N200-all-b8192-seed0``; fit for a folder.

    It holds coverage, samples a position (S), temperature, below T = 1 the algorithm with its candidates (N) or its
    budget of draws (D), sequences, tokens of a block (b), steps of a flow or diffusion head (w) and seed. The data are
    not in it. What a document of an earlier version lacks has its default.
    """
    asked = EvaluationConfig().model_dump() | dict(document.get("evaluation") or {})
    lm = document.get("lm") or {}
    parts = [str(asked["coverage"]), f"S{asked['num_samples']}", f"T{float(asked['temperature']):.6g}"]
    if float(asked["temperature"]) != 1:
        parts.append(str(asked["algorithm"]))
        parts += [] if asked["algorithm"] in ("law", "noise_scale") else [f"N{asked['num_candidates']}"]
        parts += [f"D{asked['draw_budget']}"] if asked["algorithm"] == "exact" else []
    parts.append("all" if asked["max_sequences"] is None else f"n{asked['max_sequences']}")
    positions = (lm.get("backbone") or {}).get("positions")
    parts += [] if positions is None else [f"b{positions * document['patch_size']}"]
    steps = (lm.get("head") or {}).get("sampling_steps")
    parts += [] if steps is None else [f"w{steps}"]
    return "-".join([*parts, f"seed{asked['seed']}"])


def describe_protocol(stored: Mapping[str, Any]) -> str:
    """The ``protocol`` of a result's file in words; results with equal words and equal data may be set side by side."""
    provenance = stored.get("provenance") or {}
    parts = [
        f"{stored.get('coverage', 'first')} offsets",
        str(stored.get("sampler", f"T = {stored.get('temperature', 1.0):g}")),
        f"S {stored['num_samples']}" if "num_samples" in stored else "",
        f"{stored['num_sequences']} sequences of {stored.get('block_tokens')} tokens"
        if "num_sequences" in stored
        else "",
        f"{provenance['sampling_steps']} sampling steps" if "sampling_steps" in provenance else "",
        f"seed {stored['seed']}" if "seed" in stored else "",
    ]
    return ", ".join(part for part in parts if part)


def follows_the_paper(stored: Mapping[str, Any]) -> bool:
    """Whether a result may stand beside the paper's Table 1: its text, every patch boundary, T = 1."""
    provenance = stored.get("provenance") or {}
    return (
        provenance.get("text") == PAPER_TEXT
        and stored.get("coverage") == "first"
        and stored.get("temperature") == 1
    )
