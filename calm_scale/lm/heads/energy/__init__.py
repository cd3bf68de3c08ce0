"""The energy head without torch: settings, parameters, FLOPs, activation bytes, traffic. Its module is beside this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from calm_scale.accounting.activations import FP32, Saved, element
from calm_scale.accounting.communication import Traffic
from calm_scale.accounting.components import Component, linear, weights
from calm_scale.config.lm import BlockHeadConfig, LMStage
from calm_scale.config.run import RunConfig
from calm_scale.config.section import RESULTS

if TYPE_CHECKING:
    from calm_scale.lm.heads.energy.module import EnergyHead

DRAWS = 128
"""Posterior draws in one stream; part of the noise's name, so changing it changes the numbers."""
_CHUNK_ELEMENTS = 1 << 20


def rows_per_chunk(num_samples: int, num_posterior: int, size: int) -> int:
    """Positions whose N samples and M draws of size l the loss works on at once."""
    widest = max(min(num_posterior, DRAWS), num_samples * (num_samples - 1) // 2) * size
    return max(1, _CHUNK_ELEMENTS // widest)


class EnergyHeadConfig(BlockHeadConfig):
    """Single-step sampler trained with the energy loss (Eq. 10)."""

    splits_weights = True
    scales_noise = True

    kind: Literal["energy"] = "energy"
    """The head's name."""
    noise_size: int = Field(default=64, gt=0)
    """Numbers of noise that a sample begins with."""
    num_samples: Annotated[int, RESULTS] = Field(default=8, ge=2)
    """Samples of the head at each position in the loss, N."""
    num_posterior: Annotated[int, RESULTS] = Field(default=100, ge=1)
    """Draws from the encoder's posterior at each position in the loss, M."""
    alpha: Annotated[float, RESULTS] = Field(default=1.0, gt=0, le=2)
    """Exponent of the distances; the score is strictly proper below 2, at 2 only the samples' mean counts."""

    @property
    def repeats(self) -> int:
        """N samples."""
        return self.num_samples

    def components(self, run: RunConfig, *, shared_condition: bool = True) -> Sequence[Component]:
        """ε → samples ẑ ``[N, l]`` given h ``[d]``.

        ``shared_condition`` splits each block's Linear(x ‖ h) into W_x·x (per sample) and W_h·h (once per position);
        False counts the unsplit form, in which the condition is projected N times.
        """
        stage = run.require_lm()
        return _components(
            self, stage.num_blocks, stage.backbone.hidden_size, run.latent_size, shared_condition
        )

    def loss_components(self, run: RunConfig) -> Sequence[Component]:
        """Pairwise distances of Eq. 10, l MACs each: N·M sample–target pairs, N(N − 1)/2 sample–sample pairs.

        Targets need no gradient, so the first kind pulls on one point and the second on two.
        """
        n, m, latent = self.num_samples, self.num_posterior, run.latent_size
        return [
            Component("loss.sample_target", "loss", 0, n * m * latent, backward=1, per_step=0),
            Component("loss.sample_sample", "loss", 0, n * (n - 1) // 2 * latent, backward=2, per_step=0),
        ]

    def kept_bytes(self, run: RunConfig, rows: int) -> Saved:
        """Embeddings, ten vectors a block and sample, final layer, samples and their gradient; the loss's workspace."""
        lm, n = run.require_lm(), self.num_samples
        d, w, recomputes = lm.backbone.hidden_size, element(lm), lm.parallel.recompute == "full"
        embedding = w * (n * (self.noise_size + d) + 3 * d)
        # Of the ten vectors a block keeps, six are hidden widths, which a split of the weights divides.
        split = lm.parallel.tensor if lm.parallel.head_parallelism == "tensor" else 1
        block = (4 + 6 / split) * n * d * w
        final = n * d * (3 * w + FP32)
        samples = 2 * FP32 * n * run.latent_size
        kept_block = n * d * w if recomputes else block
        passing = max(self._workspace(run.latent_size, rows), block if recomputes else 0.0)
        return Saved(embedding + lm.num_blocks * kept_block + final + samples, passing)

    def traffic(self, run: RunConfig, hidden: float, micro_batches: int) -> Sequence[Traffic]:
        """Every block: two all-reduces forward, two and the condition's backward, one again where blocks are
        recomputed. Under sequence parallelism all positions are gathered first."""
        lm, m = run.require_lm(), micro_batches
        again = 1 if lm.parallel.recompute == "full" else 0
        calls, size = m * lm.num_blocks, lm.parallel.tensor
        moved = calls * (4 + again) * self.num_samples * hidden + calls * hidden
        found = [Traffic("tensor", size, "all_reduce", "head blocks", calls * (5 + again), moved)]
        if lm.parallel.sequence_parallel:
            found.append(Traffic("tensor", size, "all_gather", "hidden states", m, m * hidden))
        return found

    def build(self, stage: LMStage, latent_size: int) -> EnergyHead:
        """The torch module."""
        from calm_scale.lm.heads.energy.module import EnergyHead

        return EnergyHead(
            stage.backbone.hidden_size,
            latent_size,
            num_blocks=stage.num_blocks,
            noise_size=self.noise_size,
            num_samples=self.num_samples,
            num_posterior=self.num_posterior,
            alpha=self.alpha,
            init_std=stage.backbone.init_std,
            recompute=stage.parallel.recompute == "full",
        )

    def tiny(self) -> EnergyHeadConfig:
        """Two blocks, five draws at most."""
        return self.model_copy(update={"num_blocks": 2, "num_posterior": min(5, self.num_posterior)})

    def loss_alone(self, run: RunConfig, batch: int) -> Callable[[bool], object]:
        """Torch's counter misses in-place products, and sees the pairs of samples as a product of N columns."""
        from calm_scale.lm.heads.energy.module import score_noise

        shape = (batch, run.require_lm().backbone.positions, self.num_samples, run.latent_size)
        return lambda with_gradient: score_noise(shape, self.num_posterior, self.alpha, with_gradient)

    def notes(self) -> Sequence[str]:
        """At α = 2 the score is not strictly proper."""
        if self.alpha != 2:
            return ()
        return (
            "alpha: at 2 the energy score is not strictly proper: it trains the mean of the samples and nothing else; "
            "below 2 it trains their whole law",
        )

    def _workspace(self, latent: int, rows: int) -> float:
        """Draws of one chunk and five N × M matrices; bounded by the chunk, whatever the number of positions."""
        n, m = self.num_samples, min(self.num_posterior, DRAWS)
        chunk = rows_per_chunk(n, m, latent)
        return FP32 * (m * latent + 5 * n * m) * min(chunk, rows) / max(rows, 1)


@lru_cache(maxsize=64)
def _components(
    head: EnergyHeadConfig, num_blocks: int, d: int, latent: int, shared_condition: bool
) -> tuple[Component, ...]:
    n = head.num_samples

    def per_sample(component: Component) -> Component:
        return replace(component, uses=n, per_step=0, per_draw=1)

    def once(component: Component) -> Component:
        return component if shared_condition else per_sample(component)

    found = [
        per_sample(linear("head.noise_embd", "head", head.noise_size, d, bias=True, backward=1)),
        once(linear("head.hidden_embd", "head", d, d, bias=True)),
        weights("head.norms", "head", 4 * d),
    ]
    for i in range(num_blocks):
        block = f"head.block.{i}"
        found += [
            weights(f"{block}.norm", "head", 2 * d),
            once(linear(f"{block}.condition", "head", d, d, split="columns", recomputed=True)),
            per_sample(linear(f"{block}.sample", "head", d, d, bias=True, split="columns", recomputed=True)),
            per_sample(linear(f"{block}.hidden", "head", d, d, bias=True, split="rows", recomputed=True)),
            per_sample(
                linear(f"{block}.gate_up", "head", d, 2 * d, bias=True, split="columns", recomputed=True)
            ),
            # Nothing needs the result of the last product again.
            per_sample(linear(f"{block}.down", "head", d, d, bias=True, split="rows")),
        ]
    return (
        *found,
        weights("head.final.norm", "head", 2 * d),
        per_sample(linear("head.final.hidden", "head", d, d, bias=True)),
        per_sample(linear("head.final.out", "head", d, latent, bias=True)),
    )
