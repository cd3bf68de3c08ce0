"""The energy head: noise and a hidden state in, one latent out, in a single step (paper Eq. 10).

``head_parallelism: tensor`` splits the weights of its blocks over tensor-parallel ranks. Each block is then two
column-then-row pairs, so it costs two all-reduces forward and as many backward for every position and sample; every
rank computes all positions and the whole loss. Position parallelism needs none of that: the split form is for heads
too wide for one device, and for measuring the difference.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calm_scale.lm.energy_score import Backend, energy_score
from calm_scale.lm.heads.base import GenerativeHead, init_linears, linear_fp32
from calm_scale.lm.heads.split import enter, leave, split_columns, split_rows
from calm_scale.runtime.noise import PositionNoise, Randomness, uniform

_NORM_EPS = 1e-6


class EnergyBlock(nn.Module):
    """x + W_d(silu(g)·u), (g, u) = W_4 silu(W_2 silu(W_x·LN(x) + W_h·h)).

    ``linears.0`` is one matrix over (x ‖ h), as the reference stores it; its two halves are applied apart, so the
    h half is computed once per position and shared by the N samples.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(size, eps=_NORM_EPS)
        self.linears = nn.Sequential(
            nn.Linear(2 * size, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 2 * size)
        )
        self.down_proj = nn.Linear(size, size)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, noise_scale: float | None = None
    ) -> torch.Tensor:
        """x [..., N, d], hidden [..., d] → [..., N, d]. ``noise_scale`` multiplies LN(x)."""
        entry, middle, gates = (_linear(self.linears, index) for index in (0, 2, 4))
        size = x.shape[-1]
        y = F.linear(_scaled(self.in_ln(x), noise_scale), entry.weight[:, :size])
        y += F.linear(hidden, entry.weight[:, size:], entry.bias).unsqueeze(-2)
        y = middle(F.silu(y))
        gate, up = gates(F.silu(y)).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        out += x
        return out


class FinalLayer(nn.Module):
    """LN → linear d→d → SiLU → linear d→l, the last in fp32 and zero at the start: all samples begin at 0."""

    def __init__(self, size: int, latent_size: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(size, eps=_NORM_EPS)
        self.linears = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, latent_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] → [..., l]."""
        return linear_fp32(_linear(self.linears, 2), F.silu(self.linears[0](self.in_ln(x))))


def _scaled(x: torch.Tensor, factor: float | None) -> torch.Tensor:
    return x if factor is None else x * factor


def _linear(layers: nn.Sequential, index: int) -> nn.Linear:
    return cast(nn.Linear, layers[index])


class EnergyHead(GenerativeHead):
    """Parameters carry the names and shapes of the reference checkpoint's ``generative_head.*``.

    Args:
        num_samples: N, model samples a position in the loss. num_posterior: M. alpha: exponent of the distance.
        recompute: keep only block inputs for the backward pass (the noise is an input, so nothing is redrawn).
        backend: of the energy loss.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        num_blocks: int,
        noise_size: int = 64,
        num_samples: int = 8,
        num_posterior: int = 100,
        alpha: float = 1.0,
        init_std: float = 0.02,
        recompute: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(hidden_size, latent_size)
        self.noise_size = noise_size
        self.num_samples = num_samples
        self.num_posterior = num_posterior
        self.alpha = alpha
        self.recompute = recompute
        self.backend: Backend = backend
        self.noise_embd = nn.Linear(noise_size, hidden_size)
        self.hidden_embd = nn.Linear(hidden_size, hidden_size)
        self.norm_hidden = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.norm_noise = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.mlp_blocks = nn.ModuleList(EnergyBlock(hidden_size) for _ in range(num_blocks))
        self.final_layer = FinalLayer(hidden_size, latent_size)
        self.reset_parameters(init_std)

    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """N(0, init_std) weights, zero biases, zero last layer."""
        init_linears(self, init_std, generator)
        nn.init.zeros_(_linear(self.final_layer.linears, 2).weight)

    def forward(
        self, hidden: torch.Tensor, noise: torch.Tensor, noise_scale: float | None = None
    ) -> torch.Tensor:
        """One latent for each noise vector: hidden [..., d], noise [..., N, noise_size] → [..., N, l].

        ``noise_scale`` multiplies the embedded noise after its norm, and again after the first block's, which would
        undo it there. In training it is None.
        """
        dtype = self.weight_dtype
        x = _scaled(self.norm_noise(self.noise_embd(noise.to(dtype))), noise_scale)
        h = self.norm_hidden(self.hidden_embd(hidden.to(dtype)))
        for index, block in enumerate(self.mlp_blocks):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, h, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, h, noise_scale if index == 0 else None)
        return self.final_layer(x)  # type: ignore[no-any-return]

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Energy loss of each position (Eq. 10), [B, p]; see ``GenerativeHead.loss``."""
        drawn = noise.uniform("head", self.num_samples, self.noise_size, low=-0.5, high=0.5)
        return energy_score(
            self(hidden, drawn),
            mean,
            log_std,
            noise,
            num_posterior=self.num_posterior,
            alpha=self.alpha,
            backend=self.backend,
        )

    def split(self, rank: int, size: int) -> EnergyHead:
        """Replaces each residual block by this rank's part of it. The rest of the head stays replicated."""
        parts = (SplitEnergyBlock(cast(EnergyBlock, block), rank, size) for block in self.mlp_blocks)
        self.mlp_blocks = nn.ModuleList(parts)
        return self

    def sample(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """hidden [..., d] → [num_samples, ..., l]."""
        return self._sample(hidden, num_samples, generator, None)

    def sample_nearer(
        self, hidden: torch.Tensor, num_samples: int, generator: Randomness, noise_scale: float
    ) -> torch.Tensor:
        """See ``GenerativeHead.sample_nearer``."""
        return self._sample(hidden, num_samples, generator, noise_scale)

    def _sample(
        self, hidden: torch.Tensor, num_samples: int, generator: Randomness, noise_scale: float | None
    ) -> torch.Tensor:
        shape = (*hidden.shape[:-1], num_samples, self.noise_size)
        drawn = uniform(shape, generator).to(hidden.device) - 0.5
        return self(hidden, drawn, noise_scale).movedim(-2, 0)  # type: ignore[no-any-return]


class SplitEnergyBlock(nn.Module):
    """One rank's part of an ``EnergyBlock``: the same function, parameter names and checkpoint keys.

    Split by output rows: ``linears.0`` and ``linears.4`` (gate and up rows alike). By input columns:
    ``linears.2`` and ``down_proj``, whose partial results are summed over the group before the bias.
    """

    def __init__(self, block: EnergyBlock, rank: int, size: int) -> None:
        super().__init__()
        entry, middle, gates = (cast(nn.Linear, block.linears[i]) for i in (0, 2, 4))
        self.in_ln = block.in_ln
        self.linears = nn.ModuleDict(
            {
                "0": split_rows(entry, rank, size),
                "2": split_columns(middle, rank, size),
                "4": split_rows(gates, rank, size, parts=2),
            }
        )
        self.down_proj = split_columns(block.down_proj, rank, size)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, noise_scale: float | None = None
    ) -> torch.Tensor:
        """As ``EnergyBlock``; x and the result are replicated over the group."""
        entry, middle, gates = (cast(nn.Linear, self.linears[key]) for key in ("0", "2", "4"))
        width = x.shape[-1]
        of_hidden = F.linear(enter(hidden), entry.weight[:, width:], entry.bias)
        y = F.linear(enter(_scaled(self.in_ln(x), noise_scale)), entry.weight[:, :width])
        y = y + of_hidden.unsqueeze(-2)
        y = leave(F.linear(F.silu(y), middle.weight)) + middle.bias
        gate, up = gates(enter(F.silu(y))).chunk(2, dim=-1)
        return x + leave(F.linear(F.silu(gate) * up, self.down_proj.weight)) + self.down_proj.bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Which axis of which weight is split."""
        from megatron.core import parallel_state
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        axes = {"linears.0.weight": 0, "linears.0.bias": 0, "linears.2.weight": 1, "down_proj.weight": 1}
        gated = {"linears.4.weight": 0, "linears.4.bias": 0}
        described = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes | gated,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        for name in gated:
            described[prefix + name] = apply_swiglu_sharded_factory(described[prefix + name], sharded_offsets)
        return dict(described)


def score_noise(
    shape: tuple[int, int, int, int], num_posterior: int, alpha: float, with_gradient: bool
) -> None:
    """The energy loss alone, of standard normal samples [B, P, N, l] around a posterior of the same kind."""
    b, p, _, l = shape
    samples = torch.randn(shape, requires_grad=with_gradient)
    mean = torch.randn(b, p, l)
    noise = PositionNoise(0, 0, list(range(b)), range(p))
    loss = energy_score(
        samples, mean, torch.zeros_like(mean), noise, num_posterior=num_posterior, alpha=alpha
    )
    if with_gradient:
        loss.sum().backward()
