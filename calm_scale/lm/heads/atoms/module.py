"""The atoms head: a hidden state in, C latents and their weights out, which are the whole law of the next latent.

``head_parallelism: tensor`` splits the hidden layer by columns and both projections by rows: one sum of atoms and one
of logits forward, one of the hidden state's gradient backward; every rank then computes the whole loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from calm_scale.lm.heads.atoms.score import AtomScore
from calm_scale.lm.heads.base import GenerativeHead, init_linears, linear_fp32
from calm_scale.lm.heads.split import enter, leave, split_columns, split_rows
from calm_scale.runtime.noise import PositionNoise, Randomness, categorical

_OUTPUT_STD = 0.02  # of the last weights: the atoms begin apart by their bias, whatever the hidden state
_SPREAD = 0.5


class Mixture(nn.Module):
    """h → SiLU(W h) [2d] → C atoms and C logits."""

    def __init__(self, hidden_size: int, latent_size: int, num_atoms: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(hidden_size, 2 * hidden_size)
        self.atoms = nn.Linear(2 * hidden_size, num_atoms * latent_size)
        self.logits = nn.Linear(2 * hidden_size, num_atoms)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., d] → atoms [..., C·l] in the weights' type, logits [..., C] fp32."""
        x = F.silu(self.hidden(hidden))
        return self.atoms(x), linear_fp32(self.logits, x)


class SplitMixture(nn.Module):
    """One rank's part of a ``Mixture``: the same function, parameter names and checkpoint keys."""

    def __init__(self, whole: Mixture, rank: int, size: int) -> None:
        super().__init__()
        self.hidden = split_rows(whole.hidden, rank, size)
        self.atoms = split_columns(whole.atoms, rank, size)
        self.logits = split_columns(whole.logits, rank, size)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Mixture``; arguments and results are replicated over the group."""
        x = F.silu(self.hidden(enter(hidden)))
        atoms = leave(F.linear(x, self.atoms.weight)) + self.atoms.bias
        kind = torch.promote_types(x.dtype, torch.float32)
        logits = leave(F.linear(x.to(kind), self.logits.weight.to(kind))) + self.logits.bias.to(kind)
        return atoms, logits

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Which axis of which weight is split."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        described = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"hidden.weight": 0, "hidden.bias": 0, "atoms.weight": 1, "logits.weight": 1},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return dict(described)


class AtomHead(GenerativeHead):
    """The law Σ_c w_c δ(a_c).

    Args:
        num_atoms: C. num_posterior: M. alpha, log_weight, log_scale: see ``AtomScore``.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        num_atoms: int = 64,
        num_posterior: int = 8,
        alpha: float = 1.0,
        log_weight: float = 0.1,
        log_scale: float = 0.7,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(hidden_size, latent_size)
        self.num_atoms = num_atoms
        self.score = AtomScore(num_posterior, alpha, log_weight, log_scale)
        self.mixture: Mixture | SplitMixture = Mixture(hidden_size, latent_size, num_atoms)
        self.reset_parameters(init_std)

    def reset_parameters(self, init_std: float, generator: torch.Generator | None = None) -> None:
        """N(0, init_std) in the hidden layer, N(0, 0.02) after it; atoms at N(0, 0.5²) by their bias, equal weights."""
        init_linears(self, init_std, generator)
        for layer in (self.mixture.atoms, self.mixture.logits):
            nn.init.normal_(layer.weight, std=_OUTPUT_STD, generator=generator)
        nn.init.normal_(self.mixture.atoms.bias, std=_SPREAD, generator=generator)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., d] → atoms [..., C, l], logits [..., C]."""
        atoms, logits = self.mixture(hidden.to(self.weight_dtype))
        return atoms.unflatten(-1, (self.num_atoms, self.latent_size)), logits

    def loss(
        self, hidden: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor, noise: PositionNoise
    ) -> torch.Tensor:
        """Exact energy score and λ times the log score of each position, [B, p]."""
        atoms, logits = self(hidden)
        return self.score(atoms, logits, mean, log_std, noise)

    def law(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., d] → atoms [..., C, l] and their weights [..., C], fp32."""
        atoms, logits = self(hidden)
        return atoms.float(), torch.softmax(logits.float(), dim=-1)

    def sample(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """hidden [..., d] → [num_samples, ..., l]: atoms drawn by their weights."""
        atoms, weights = self.law(hidden.reshape(-1, self.hidden_size))
        drawn = categorical(weights.to(generator.device), num_samples, generator).to(atoms.device)
        taken = atoms.gather(1, drawn[..., None].expand(-1, -1, self.latent_size))
        return taken.transpose(0, 1).reshape(num_samples, *hidden.shape[:-1], self.latent_size)

    def split(self, rank: int, size: int) -> AtomHead:
        """Replaces the layers by this rank's part of them."""
        if isinstance(self.mixture, Mixture):
            self.mixture = SplitMixture(self.mixture, rank, size)
        return self
