"""The atoms head without torch: settings, parameters, FLOPs, activation bytes, traffic. Its module is beside this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from calm_scale.accounting.activations import FP32, Saved, element
from calm_scale.accounting.communication import Traffic
from calm_scale.accounting.components import Component, linear
from calm_scale.config.lm import HeadConfig, LMStage
from calm_scale.config.run import RunConfig
from calm_scale.config.section import RESULTS

if TYPE_CHECKING:
    from calm_scale.lm.heads.atoms.module import AtomHead

_CHUNK_ELEMENTS = 1 << 19


def rows_per_chunk(num_atoms: int, num_posterior: int, size: int) -> int:
    """Positions whose C atoms of size l and M targets the loss works on at once."""
    widest = max(num_atoms * max(num_atoms, num_posterior, size), num_posterior * size)
    return max(1, _CHUNK_ELEMENTS // widest)


class AtomHeadConfig(HeadConfig):
    """C latents and their weights, trained with the exact energy score of that law."""

    splits_weights = True

    kind: Literal["atoms"] = "atoms"
    """The head's name."""
    num_atoms: int = Field(default=64, ge=2, le=8192)
    """Latents of the law at each position, C: the most patches that it can tell apart."""
    num_posterior: Annotated[int, RESULTS] = Field(default=8, ge=1, le=4096)
    """Draws from the encoder's posterior at each position in the loss, M."""
    alpha: Annotated[float, RESULTS] = Field(default=1.0, gt=0, lt=2)
    """Exponent of the distances; the score is strictly proper below 2."""
    log_weight: Annotated[float, RESULTS] = Field(default=0.1, ge=0)
    """Weight of the mixture's log score in the loss; 0 trains by the energy score alone."""
    log_scale: Annotated[float, RESULTS] = Field(default=0.7, gt=0)
    """Standard deviation of the Gaussian around each atom in the log score."""

    @property
    def num_listed(self) -> int:
        """C."""
        return self.num_atoms

    def components(self, run: RunConfig, *, shared_condition: bool = True) -> Sequence[Component]:
        """h ``[d]`` → SiLU layer ``[2d]`` → C atoms ``[l]`` and C logits, once a position whatever is drawn."""
        d, c = run.require_lm().backbone.hidden_size, self.num_atoms
        return [
            linear("head.hidden", "head", d, 2 * d, bias=True, split="columns"),
            linear("head.atoms", "head", 2 * d, c * run.latent_size, bias=True, split="rows"),
            linear("head.logits", "head", 2 * d, c, bias=True, split="rows"),
        ]

    def loss_components(self, run: RunConfig) -> Sequence[Component]:
        """All C·M atom–target and C² atom–atom pairs, l MACs each for distances and as many for their gradient;
        of each atom, the mean distance to the others."""
        c, m, latent = self.num_atoms, self.num_posterior, run.latent_size
        return [
            Component("loss.atom_target", "loss", 0, c * m * latent, backward=1, per_step=0),
            Component("loss.atom_atom", "loss", 0, c * c * latent, backward=1, per_step=0),
            Component("loss.mean_distance", "loss", 0, c * c, backward=1, per_step=0),
        ]

    def kept_bytes(self, run: RunConfig, rows: int) -> Saved:
        """Hidden state, the layer of 2d before and after SiLU, atoms, logits, and the gradient of both; one chunk."""
        lm, c, m, latent = run.require_lm(), self.num_atoms, self.num_posterior, run.latent_size
        d, w = lm.backbone.hidden_size, element(lm)
        split = lm.parallel.tensor if lm.parallel.head_parallelism == "tensor" else 1
        kept = w * (d + 4 * d / split) + 2 * c * latent * w + 2 * FP32 * c
        workspace = FP32 * (3 * c * c + 5 * c * m + 4 * c * latent + m * latent)
        chunk = min(rows_per_chunk(c, m, latent), rows)
        return Saved(kept, workspace * chunk / max(rows, 1))

    def traffic(self, run: RunConfig, hidden: float, micro_batches: int) -> Sequence[Traffic]:
        """The sums of atoms and logits forward, of the hidden states' gradient backward. Under sequence parallelism all
        positions are gathered first."""
        lm, m = run.require_lm(), micro_batches
        size, d, w = lm.parallel.tensor, lm.backbone.hidden_size, element(lm)
        atoms, logits = (self.num_atoms * n * hidden / (d * w) for n in (run.latent_size * w, FP32))
        found = [Traffic("tensor", size, "all_reduce", "head", 3 * m, m * (atoms + logits + hidden))]
        if lm.parallel.sequence_parallel:
            found.append(Traffic("tensor", size, "all_gather", "hidden states", m, m * hidden))
        return found

    def build(self, stage: LMStage, latent_size: int) -> AtomHead:
        """The torch module."""
        from calm_scale.lm.heads.atoms.module import AtomHead

        return AtomHead(
            stage.backbone.hidden_size,
            latent_size,
            num_atoms=self.num_atoms,
            num_posterior=self.num_posterior,
            alpha=self.alpha,
            log_weight=self.log_weight,
            log_scale=self.log_scale,
            init_std=stage.backbone.init_std,
        )

    def tiny(self) -> AtomHeadConfig:
        """Six atoms, five draws at most."""
        return self.model_copy(
            update={"num_atoms": min(6, self.num_atoms), "num_posterior": min(5, self.num_posterior)}
        )
