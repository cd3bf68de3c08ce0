"""A model at a temperature: its draws sharpened by Algorithm 1 or 2, from the law it states, or nearer to each other.

Everything that reads a PatchModel (generation, BrierLM, accuracy–collision curves) takes a tempered one unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch

from calm_scale.runtime.noise import Randomness, of_rows
from calm_scale.sampling.batch import SamplingError, choose, exponent, take
from calm_scale.sampling.exact import sample_exact
from calm_scale.sampling.law import sample_law
from calm_scale.sampling.one_draw import ONE_DRAW, NearerModel

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import LatentModel, PatchModel, Shown, StatedLaw

_LOGITS = 1 << 28  # fp32: 1 GiB


def draw_rows(model: PatchModel, hidden: Tensor, num_samples: int, generator: Randomness) -> Tensor:
    """Ids ``[num_samples, R, K]`` for hidden ``[R, d]``.

    The pieces follow from the arguments alone, so a seed means the same ids; a piece is some rows with all their
    samples, or, where one row's samples are too many, a part of those.
    """
    per_sample = model.patch_size * model.vocab_size
    rows_at_once = max(1, _LOGITS // (num_samples * per_sample))
    samples_at_once = max(1, min(num_samples, _LOGITS // per_sample))
    pieces = []
    for begin in range(0, len(hidden), rows_at_once):
        rows = hidden[begin : begin + rows_at_once]
        source = of_rows(generator, range(begin, begin + len(rows)))
        counts = [min(samples_at_once, num_samples - i) for i in range(0, num_samples, samples_at_once)]
        pieces.append(torch.cat([model.draw(rows, count, source) for count in counts]))
    return torch.cat(pieces, dim=1)


Algorithm = Literal["plain", "exact", "batch", "law", "noise_scale", "shrink"]
_ROWS = 1024  # rows tempered together


class TemperatureSettings(Protocol):
    """The fields of ``GenerationConfig`` and ``EvaluationConfig`` that say how to draw."""

    @property
    def temperature(self) -> float: ...

    @property
    def num_candidates(self) -> int: ...

    @property
    def draw_budget(self) -> int: ...


@dataclass
class DrawTally:
    """What sampling cost: patches delivered, model draws made, and how many were not by the asked-for rule."""

    num_patches: int = 0
    num_draws: int = 0
    num_fallbacks: int = 0

    def add(self, patches: int, draws: int, fallbacks: int) -> None:
        """Counts one call."""
        self.num_patches += patches
        self.num_draws += draws
        self.num_fallbacks += fallbacks


def check_budget(algorithm: Algorithm, settings: TemperatureSettings) -> None:
    """Raises SamplingError where Algorithm 1 could not make one round; needs no model."""
    if algorithm != "exact" or settings.temperature == 1:
        return
    n = exponent(settings.temperature).n
    if settings.draw_budget < n:
        raise SamplingError(
            f"draw_budget {settings.draw_budget} is below the {n} draws one round at T = {settings.temperature} "
            "takes; raise it"
        )


class TemperedModel:
    """A PatchModel whose ``draw`` samples from P^{1/T}/Z (exactly, or by Algorithm 2's approximation).

    Args:
        model: the law at T = 1.
        algorithm: ``plain`` ignores the temperature; ``exact`` is Algorithm 1, ``batch`` Algorithm 2; ``law`` draws
            from the tempered law of a model that states it; for ``noise_scale`` and ``shrink`` the temperature is the
            scale s of ``one_draw``.
        settings: temperature, number of candidates N, draw budget.

    ``tally`` counts draws and fall-backs since it was made.

    Raises:
        SamplingError: the budget does not pay for one round of Algorithm 1, or ``law`` of a model that states none.
    """

    def __init__(self, model: PatchModel, algorithm: Algorithm, settings: TemperatureSettings) -> None:
        self.model = model
        self.patch_size, self.vocab_size = model.patch_size, model.vocab_size
        self.device = model.device
        self.shows: Shown = "samples"
        self.temperature = 1.0 if algorithm == "plain" else settings.temperature
        self.algorithm: Algorithm = "plain" if self.temperature == 1 else algorithm
        self.num_candidates, self.draw_budget = settings.num_candidates, settings.draw_budget
        self.tally = DrawTally()
        self._at = exponent(self.temperature)
        self.source: PatchModel = model
        """The law that is sharpened, or, for one draw, that is drawn from."""
        if self.algorithm in ONE_DRAW:
            self.source = NearerModel(
                cast("LatentModel", model), self.algorithm, self.temperature, self.num_candidates
            )
        check_budget(self.algorithm, settings)
        if self.algorithm == "law" and model.shows != "law":
            raise SamplingError(
                "algorithm law needs a head that states its law (lm.head.kind: atoms); use exact or batch"
            )

    @property
    def head_temperature(self) -> float:
        """At which a prompt's last patch is completed, drawing from ``source``."""
        return 1.0 if self.algorithm in ONE_DRAW else self.temperature

    @property
    def sampler(self) -> str:
        """The sampling rule in words, for reports."""
        if self.algorithm == "plain":
            return "plain, T = 1"
        if self.algorithm == "law":
            return f"from the stated law, T = {self.temperature:g}"
        if self.algorithm == "exact":
            return (
                f"Algorithm 1 (exact), T = {self.temperature:g}, budget {self.draw_budget} draws, "
                f"then Algorithm 2 with N = {self.num_candidates}"
            )
        if self.algorithm == "noise_scale":
            return f"one draw, noise × {self.temperature:g}"
        if self.algorithm == "shrink":
            return f"one draw, shrunk × {self.temperature:g} to the mean of {self.num_candidates}"
        continued = " (continued to non-integer 1/T)" if self._at.alpha else ""
        return f"Algorithm 2{continued}, T = {self.temperature:g}, N = {self.num_candidates}"

    def hidden(self, tokens: Tensor) -> Tensor:
        """The model's own."""
        return self.model.hidden(tokens)

    def begin(self, batch_size: int, max_patches: int) -> Any:
        """The model's own."""
        return self.model.begin(batch_size, max_patches)

    def advance(self, state: Any, patches: Tensor) -> Tensor:
        """The model's own."""
        return self.model.advance(state, patches)

    def draw(self, hidden: Tensor, num_samples: int, generator: Randomness) -> Tensor:
        """Ids ``[num_samples, ..., K]``, independent samples at this temperature for hidden ``[..., d]``."""
        if self.algorithm == "plain" or self.algorithm in ONE_DRAW:
            patches = num_samples * hidden[..., 0].numel()
            self.tally.add(patches, patches, 0)
            drawn = draw_rows(self.source, hidden.flatten(0, -2), num_samples, generator)
        elif self.algorithm == "law":
            rows = hidden.reshape(-1, hidden.shape[-1])
            self.tally.add(num_samples * len(rows), num_samples * len(rows), 0)
            model = cast("StatedLaw", self.model)
            drawn = sample_law(model, rows, num_samples, self.temperature, generator)
        else:
            rows = hidden.reshape(-1, hidden.shape[-1])
            numbers = torch.arange(len(rows)).repeat(num_samples)
            pieces = [self._tempered(rows[part], of_rows(generator, part)) for part in numbers.split(_ROWS)]
            drawn = torch.cat(pieces)
        return drawn.reshape(num_samples, *hidden.shape[:-1], self.patch_size)

    def _tempered(self, rows: Tensor, generator: Randomness) -> Tensor:
        if self.algorithm == "batch":
            candidates = draw_rows(self.model, rows, self.num_candidates, generator)
            choice = choose(candidates, self.temperature, generator)
            self.tally.add(len(rows), self.num_candidates * len(rows), choice.num_fallbacks(self._at.n))
            return take(candidates, choice.index)
        result = sample_exact(
            lambda index, number: draw_rows(self.model, rows[index], number, of_rows(generator, index)),
            len(rows),
            self.temperature,
            generator,
            budget=self.draw_budget,
            fallback_candidates=self.num_candidates,
        )
        self.tally.add(len(rows), result.made, int(result.fell_back.sum()))
        return result.patches
