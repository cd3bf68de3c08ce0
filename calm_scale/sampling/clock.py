"""Where generation's time goes: exclusive seconds of named, nested parts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import LatentModel, PatchModel, StatedLaw
    from calm_scale.runtime.noise import Randomness


class Clock:
    """Seconds by part; a part's time excludes the parts opened inside it. Waits for the device at each border."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the block under ``name``."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedModel:
    """A PatchModel that books its time: backbone, head, decoder (``draw`` where the model cannot split the two)."""

    def __init__(self, model: PatchModel, clock: Clock) -> None:
        self.model, self.clock = model, clock
        self.patch_size, self.vocab_size = model.patch_size, model.vocab_size
        self.device, self.shows = model.device, model.shows

    def hidden(self, tokens: Tensor) -> Tensor:
        """Booked as backbone."""
        with self.clock.part("backbone"):
            return self.model.hidden(tokens)

    def begin(self, batch_size: int, max_patches: int) -> Any:
        """Booked as backbone."""
        with self.clock.part("backbone"):
            return self.model.begin(batch_size, max_patches)

    def advance(self, state: Any, patches: Tensor) -> Tensor:
        """Booked as backbone."""
        with self.clock.part("backbone"):
            return self.model.advance(state, patches)

    def draw(self, hidden: Tensor, num_samples: int, generator: Randomness) -> Tensor:
        """Head and decoder booked apart where the model shows its latents."""
        if self.shows not in ("latents", "law"):
            with self.clock.part("head + decoder"):
                return self.model.draw(hidden, num_samples, generator)
        return self.decode_ids(self.draw_latents(hidden, num_samples, generator))

    def draw_latents(
        self, hidden: Tensor, num_samples: int, generator: Randomness, noise_scale: float = 1.0
    ) -> Tensor:
        """Booked as head."""
        with self.clock.part("head"):
            return cast("LatentModel", self.model).draw_latents(hidden, num_samples, generator, noise_scale)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own, booked nowhere."""
        return cast("LatentModel", self.model).encode(tokens)

    def decode_ids(self, latents: Tensor) -> Tensor:
        """Booked as decoder."""
        with self.clock.part("decoder"):
            return cast("LatentModel", self.model).decode_ids(latents)

    @property
    def num_listed(self) -> int:
        """The model's own."""
        return cast("StatedLaw", self.model).num_listed

    def stated_law(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Booked as head and decoder."""
        with self.clock.part("head + decoder"):
            return cast("StatedLaw", self.model).stated_law(hidden)
