"""Under which protocol a checkpoint was scored: as a name of a folder, and in words.

A BrierLM depends on its protocol, so two scores under different ones are different quantities: they have different
files and are never shown as one series.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calm_scale.config.evaluation import EvaluationConfig

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
        parts += [str(asked["algorithm"]), f"N{asked['num_candidates']}"]
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
