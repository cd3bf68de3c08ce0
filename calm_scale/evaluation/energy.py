"""How well a text fits a model without a likelihood: the energy score of its patches under the head's samples.

    E_i = (2/NM) Σ_n Σ_m ‖z_m − ẑ_n‖^α − (1/N(N−1)) Σ_{n≠k} ‖ẑ_n − ẑ_k‖^α

with z_m from the autoencoder's posterior of the true patch i and ẑ_n from the model: the training loss, so lower
is better. It ranks texts under one model; its scale belongs to the autoencoder's latent space, so values of models
with different autoencoders do not compare. The baseline's counterpart is its cross-entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from calm_scale.evaluation.brier import EvaluationError
from calm_scale.lm.energy_score import energy_score
from calm_scale.runtime.finite import require_finite
from calm_scale.runtime.noise import PositionNoise, stream_seed

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import LatentModel, PatchModel, TokenModel


@dataclass(frozen=True)
class TextScore:
    """Lower is better. ``per_token`` is what to rank by; tokens of the first patch and of a last partial one
    have no score and are counted in ``num_unscored``."""

    kind: Literal["energy", "cross-entropy"]
    per_patch: float
    per_token: float
    num_patches: int
    num_unscored: int


def score_texts(
    model: PatchModel,
    texts: Sequence[Sequence[int]],
    *,
    num_context: Sequence[int] | None = None,
    num_samples: int = 32,
    num_posterior: int = 32,
    alpha: float = 1.0,
    seed: int = 0,
) -> list[TextScore]:
    """Scores token sequences under a model; texts get the same noise, which makes their ranking steadier.

    Args:
        model: a ``LatentModel`` (energy score) or a ``TokenModel`` (cross-entropy).
        texts: token ids of each text, with its BOS if it has one.
        num_context: leading tokens of each text that are given, not scored (a prompt). A patch counts as soon as
            one of its tokens is beyond the context.
        num_samples, num_posterior: N ≥ 2 and M.

    Raises:
        EvaluationError: a text with no patch to score, or a model that shows neither latents nor probabilities.
    """
    context = num_context or [0] * len(texts)
    energy = model.shows in ("latents", "law")
    if model.shows == "samples":
        raise EvaluationError(
            "this model shows neither latents nor token probabilities: it cannot score a text"
        )
    k = model.patch_size
    scores = []
    for number, (ids, given) in enumerate(zip(texts, context, strict=True)):
        num_patches = len(ids) // k
        first = max(1, given // k)
        if why := too_short(len(ids), k, given):
            raise EvaluationError(f"text {number}: {why}")
        tokens = torch.tensor(list(ids[: num_patches * k]), device=model.device)[None]
        with torch.no_grad():
            hidden = model.hidden(tokens)[:, first - 1 : num_patches - 1]
            if energy:
                patches = tokens.view(1, num_patches, k)[:, first:]
                each = _energy(
                    cast("LatentModel", model), hidden, patches, num_samples, num_posterior, alpha, seed
                )
            else:
                each = -cast("TokenModel", model).log_probs(hidden).gather(-1, tokens[:, first:, None])
        mean = float(require_finite(each.double(), "scores").mean())
        scored = num_patches - first
        scores.append(
            TextScore("energy" if energy else "cross-entropy", mean, mean / k, scored, len(ids) - scored * k)
        )
    return scores


def too_short(num_tokens: int, patch_size: int, num_given: int = 0) -> str | None:
    """Why a text has no patch to score, or None where it has one."""
    if num_tokens // patch_size > max(1, num_given // patch_size):
        return None
    given = f" of which {num_given} are given" if num_given else ""
    return (
        f"{num_tokens} tokens{given}: no whole patch of {patch_size} tokens beyond the first is left to score"
    )


def too_long(num_tokens: int, patch_size: int, max_patches: int) -> str | None:
    """Why a text does not fit ``max_patches`` positions, or None; the last patch is not read, only scored."""
    need = num_tokens // patch_size - 1
    if need <= max_patches:
        return None
    return (
        f"{num_tokens} tokens need {need} patches of {patch_size} before the last one, the model's context has "
        f"{max_patches}"
    )


def _energy(
    model: LatentModel,
    hidden: Tensor,
    patches: Tensor,
    num_samples: int,
    num_posterior: int,
    alpha: float,
    seed: int,
) -> Tensor:
    """Energy score of each patch: hidden ``[1, p, d]``, patches ``[1, p, K]`` → ``[1, p]``."""
    generator = torch.Generator(hidden.device)
    generator.manual_seed(stream_seed("text score", seed))
    samples = model.draw_latents(hidden, num_samples, generator).movedim(0, -2)
    mean, log_std = model.encode(patches)
    noise = PositionNoise(seed, 0, [0], range(patches.shape[1]), namespace="eval", device=hidden.device)
    return energy_score(samples, mean, log_std, noise, num_posterior=num_posterior, alpha=alpha)
