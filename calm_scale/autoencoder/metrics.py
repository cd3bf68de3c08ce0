"""What an evaluation of the autoencoder reports, as numbers and as a picture.

Sums are collected per rank as one vector, so that a single all-reduce makes the report of the whole evaluation
set; nothing here knows about ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.autoencoder.objective import clipped_kl, gaussian_kl
from calm_scale.config.autoencoder import ObjectiveConfig
from calm_scale.runtime.noise import PositionNoise

COLLAPSED_KL = 0.01
"""A latent dimension whose mean KL (nats per patch) over the evaluation set is below this carries nothing."""

_NUM_SCALARS = 7


@dataclass(frozen=True)
class AutoencoderReport:
    """Means over the valid tokens and patches of the evaluation set; dropout off, z ~ q(z | patch).

    ``token_accuracy_mean`` decodes the posterior mean instead of a sample. ``noise_levels`` and
    ``noise_accuracy`` are the curve of token accuracy at z + δ · N(0, 1); its first point is δ = 0.
    """

    loss: float
    cross_entropy: float
    kl: float
    token_accuracy: float
    patch_accuracy: float
    token_accuracy_mean: float
    num_tokens: int
    num_patches: int
    std_per_dim: tuple[float, ...]
    kl_per_dim: tuple[float, ...]
    noise_levels: tuple[float, ...]
    noise_accuracy: tuple[float, ...]

    @property
    def std(self) -> float:
        """Mean σ over patches and dimensions."""
        return sum(self.std_per_dim) / len(self.std_per_dim)

    @property
    def collapsed_dims(self) -> int:
        """Dimensions whose mean KL is below ``COLLAPSED_KL``."""
        return sum(kl < COLLAPSED_KL for kl in self.kl_per_dim)

    def scalars(self) -> dict[str, float]:
        """The report as flat numbers for a metrics log (per-dimension σ as its least and greatest)."""
        out = {
            "loss": self.loss,
            "cross_entropy": self.cross_entropy,
            "kl": self.kl,
            "token_accuracy": self.token_accuracy,
            "patch_accuracy": self.patch_accuracy,
            "token_accuracy_mean": self.token_accuracy_mean,
            "std": self.std,
            "std_min": min(self.std_per_dim),
            "std_max": max(self.std_per_dim),
            "collapsed_dims": float(self.collapsed_dims),
        }
        curve = zip(self.noise_levels, self.noise_accuracy, strict=True)
        return out | {f"token_accuracy_noise_{level:g}": accuracy for level, accuracy in curve if level > 0}


class ReportSums:
    """Adds up micro-batches; ``vector`` is what ranks add together before ``report``.

    Args:
        model: the autoencoder, in full (not partitioned).
        config: the objective, for the loss of the report.
        noise_levels: extra latent noise δ at which accuracy is measured as well.
    """

    def __init__(
        self,
        model: Autoencoder,
        config: ObjectiveConfig,
        noise_levels: tuple[float, ...],
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._levels = tuple(level for level in noise_levels if level > 0)
        size = _NUM_SCALARS + len(self._levels) + 2 * model.latent_size
        self.vector = torch.zeros(size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: torch.Tensor, valid: torch.Tensor, noise: PositionNoise) -> None:
        """Measure ``tokens`` int64 [B, P, K] where ``valid`` (bool [B, P, K]) is true."""
        model, l = self._model, self._model.latent_size
        mean, log_std = model.encode(tokens)
        std = log_std.exp()
        latents = mean
        if self._config.posterior == "gaussian":
            latents = mean + std * noise.normal("posterior", l)
        ce, _ = model.reconstruction(latents, tokens, valid)
        hit = model.decode_ids(latents) == tokens
        patches = valid.any(dim=-1)
        scalars = [
            ce,
            (clipped_kl(mean, log_std, self._config.kl_floor).double() * patches).sum(),
            valid.sum(),
            patches.sum(),
            (hit & valid).sum(),
            ((hit | ~valid).all(dim=-1) & patches).sum(),
            self._hits(mean, tokens, valid),
        ]
        if self._levels:
            extra = noise.normal("extra", l)
            scalars += [self._hits(latents + level * extra, tokens, valid) for level in self._levels]
        row = torch.stack([value.double() for value in scalars])
        weight = patches.double().unsqueeze(-1)
        std_sum = (std.double() * weight).flatten(0, -2).sum(dim=0)
        kl_sum = (gaussian_kl(mean, log_std).double() * weight).flatten(0, -2).sum(dim=0)
        self.vector += torch.cat([row, std_sum, kl_sum])

    def report(self) -> AutoencoderReport:
        """The report of everything in ``vector``.

        Raises:
            ValueError: no valid token was evaluated.
        """
        values = self.vector.tolist()
        ce, kl, tokens, patches, hits, patch_hits, mean_hits = values[:_NUM_SCALARS]
        if tokens == 0:
            raise ValueError("the autoencoder was evaluated on no valid token")
        rest = values[_NUM_SCALARS:]
        noisy, per_dim = rest[: len(self._levels)], rest[len(self._levels) :]
        l, k = self._model.latent_size, self._model.patch_size
        return AutoencoderReport(
            loss=k * ce / tokens + self._config.kl_weight * kl / patches,
            cross_entropy=ce / tokens,
            kl=sum(per_dim[l:]) / patches,
            token_accuracy=hits / tokens,
            patch_accuracy=patch_hits / patches,
            token_accuracy_mean=mean_hits / tokens,
            num_tokens=int(tokens),
            num_patches=int(patches),
            std_per_dim=tuple(value / patches for value in per_dim[:l]),
            kl_per_dim=tuple(value / patches for value in per_dim[l:]),
            noise_levels=(0.0, *self._levels),
            noise_accuracy=(hits / tokens, *(value / tokens for value in noisy)),
        )

    def _hits(self, latents: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return ((self._model.decode_ids(latents) == tokens) & valid).sum()


def draw_report(report: AutoencoderReport, path: Path) -> None:
    """Token accuracy against extra latent noise, and σ and KL of every latent dimension, as one picture.

    Args:
        report: an evaluation, ``DeepSpeedEngine.last_report`` for example.
        path: the file to write; its suffix (``.png``, ``.svg``, …) decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, std, kl = figure.subplots(1, 3)
    accuracy.plot(report.noise_levels, [100 * value for value in report.noise_accuracy], marker="o")
    accuracy.set(title="Robustness", xlabel="extra latent noise δ", ylabel="token accuracy, %")
    dims = range(len(report.std_per_dim))
    std.bar(dims, sorted(report.std_per_dim), width=1.0)
    std.set(title=f"Posterior σ (mean {report.std:.3f})", xlabel="latent dimension, sorted", ylabel="σ")
    kl.bar(dims, sorted(report.kl_per_dim), width=1.0)
    kl.axhline(COLLAPSED_KL, color="grey", linestyle="--", linewidth=1)
    kl.set(
        title=f"KL ({report.collapsed_dims} of {len(dims)} collapsed)",
        xlabel="latent dimension, sorted",
        ylabel="KL, nats per patch",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
