"""Latents drawn nearer together: a temperature for one decoded draw, without the law of Algorithms 1 and 2.

``noise_scale`` multiplies the head's noise, after the norms that would undo any scale before them. ``shrink`` moves a
latent towards the mean of n draws at the same position: z̄ + s(z − z̄). Both leave the law as it is at s = 1 and have no
exact relation to P^{1/T} below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from calm_scale.config.errors import ConfigError
from calm_scale.runtime.noise import Randomness

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import LatentModel, Shown

OneDraw = Literal["noise_scale", "shrink"]
ONE_DRAW: tuple[OneDraw, ...] = ("noise_scale", "shrink")


class NearerModel:
    """A PatchModel whose latents are drawn nearer together.

    Args:
        model: shows its latents.
        scale: s, in (0, 1].
        num_mean: latents whose mean ``shrink`` draws towards, n.

    Raises:
        ConfigError: the model has no latents.
    """

    def __init__(self, model: LatentModel, kind: OneDraw, scale: float, num_mean: int) -> None:
        if model.shows not in ("latents", "law"):
            raise ConfigError(f"algorithm: {kind} draws latents, and this model has none")
        self.model, self.kind, self.scale, self.num_mean = model, kind, scale, num_mean
        self.patch_size, self.vocab_size = model.patch_size, model.vocab_size
        self.device = model.device
        self.shows: Shown = "samples"

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
        """See ``PatchModel``."""
        if self.kind == "noise_scale":
            return self.model.decode_ids(self.model.draw_latents(hidden, num_samples, generator, self.scale))
        latents = [self._shrunk(hidden, generator) for _ in range(num_samples)]
        return self.model.decode_ids(torch.stack(latents))

    def _shrunk(self, hidden: Tensor, generator: Randomness) -> Tensor:
        """One latent [..., l] from n draws of its own: samples of one position stay independent."""
        drawn = self.model.draw_latents(hidden, self.num_mean, generator)
        mean = drawn.mean(0)
        return mean + self.scale * (drawn[0] - mean)
