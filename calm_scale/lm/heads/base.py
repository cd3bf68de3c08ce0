"""What every generative head offers the language model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from calm_scale.runtime.noise import PositionNoise, Randomness


class GenerativeHead(nn.Module, ABC):
    """The law of the next latent given a hidden state: trained from posteriors, known only through samples.

    A head is position-wise: it mixes no positions, so a rank may hold any slice of them.
    """

    def __init__(self, hidden_size: int, latent_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.latent_size = latent_size

    @abstractmethod
    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Training loss of each position, unreduced.

        Args:
            hidden: [B, p, d]. mean, log_std: posterior of the patch that follows, [B, p, l].
            noise: keyed noise of these B·p positions.

        Returns:
            [B, p], fp32.
        """

    @abstractmethod
    def sample(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """Independent latents for each hidden state [..., d]: [num_samples, ..., l], fp32.

        ``generator``: with a stream for each row, hidden is [R, d].
        """

    def sample_nearer(
        self, hidden: torch.Tensor, num_samples: int, generator: Randomness, noise_scale: float
    ) -> torch.Tensor:
        """``sample`` with the noise scaled; its configuration says with ``scales_noise`` whether there is one."""
        raise NotImplementedError(f"{type(self).__name__} has no noise that could be scaled")

    @abstractmethod
    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """Initialise from ``generator`` (torch's global one if None): the same weights on every rank."""

    def law(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole law for hidden [..., d], fp32: latents [..., C, l] and their probabilities [..., C].

        Only a head whose configuration says so (``num_listed``) has it.
        """
        raise NotImplementedError(f"{type(self).__name__} is known only through samples")

    def split(self, rank: int, size: int) -> GenerativeHead:
        """This rank's part of the head under ``head_parallelism: tensor``; its configuration says if there is one."""
        raise NotImplementedError(f"{type(self).__name__} cannot split its weights over {size} ranks")

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type the head computes in."""
        return next(self.parameters()).dtype


def init_linears(module: nn.Module, init_std: float, generator: torch.Generator | None) -> None:
    """Every Linear N(0, init_std) with zero bias, every LayerNorm the identity."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=init_std, generator=generator)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
        elif isinstance(child, nn.LayerNorm) and child.elementwise_affine:
            nn.init.ones_(child.weight)
            nn.init.zeros_(child.bias)


def linear_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A narrow last projection in fp32 (fp64 for fp64): bf16 latents would tie, and their differences vanish."""
    if x.dtype == torch.float64 or (x.dtype == torch.float32 and layer.weight.dtype == torch.float32):
        return nn.functional.linear(x, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(x.float(), layer.weight.float(), bias)
