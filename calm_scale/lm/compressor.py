"""The input compressor: the K tokens of a patch become one vector of width d (method §2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from calm_scale.lm.norms import LayerNorm
from calm_scale.lm.vocabulary import VocabularyEmbedding

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

InputMode = Literal["discrete", "continuous", "both"]


class Compressor(nn.Module):
    """Token ids [b, P·K] and, by mode, latents [b, P, l] → [P, b, d].

    discrete: the embeddings of the K tokens, concatenated, through the InputMLP
    (linear K·d→2d, SiLU, linear 2d→d, LayerNorm). continuous: linear l→d of the patch's latent, LayerNorm.
    both: their sum. With sequence parallelism the result holds this rank's slice of the P positions.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, patch_size: int, latent_size: int, mode: InputMode
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.sequence_parallel = config.sequence_parallel
        d = config.hidden_size
        self.tokens = TokenInput(config, vocab_size, patch_size) if mode != "continuous" else None
        self.latent = LatentInput(config, latent_size) if mode != "discrete" else None
        self.norm = LayerNorm(config, d)  # eps 1e-6 as in the head; norm_eps is the RMSNorms'

    def forward(self, tokens: torch.Tensor, latents: torch.Tensor | None) -> torch.Tensor:
        """Compress; ``latents`` is required unless the mode is discrete."""
        parts = []
        if self.tokens is not None:
            parts.append(self.tokens(tokens))
        if self.latent is not None:
            if latents is None:
                raise ValueError("this input mode reads the autoencoder's latents, none were given")
            parts.append(self.latent(latents))
        compressed: torch.Tensor = self.norm(parts[0] if len(parts) == 1 else parts[0] + parts[1])
        return compressed


class PlainEmbedding(nn.Module):
    """The autoregressive baseline's input, one token a position: [b, P] → [P, b, d]."""

    latent = None

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = VocabularyEmbedding(config, vocab_size)

    def forward(self, tokens: torch.Tensor, latents: torch.Tensor | None = None) -> torch.Tensor:
        """Look up."""
        embedded: torch.Tensor = self.embedding(tokens)
        return embedded


class TokenInput(nn.Module):
    """Embedding of the K tokens, concatenated, through a tensor-parallel two-layer network: [b, P·K] → [P, b, d]."""

    def __init__(self, config: TransformerConfig, vocab_size: int, patch_size: int) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.patch_size = patch_size
        d = config.hidden_size
        shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": True}
        self.embedding = VocabularyEmbedding(config, vocab_size)
        self.expand = ColumnParallelLinear(patch_size * d, 2 * d, gather_output=False, **shared)
        self.contract = RowParallelLinear(2 * d, d, input_is_parallel=True, skip_bias_add=False, **shared)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        b, num_tokens = tokens.shape
        patches = tokens.view(b, num_tokens // self.patch_size, self.patch_size)
        embedded = self.embedding(patches).flatten(2)
        hidden, _ = self.expand(embedded)
        contracted: torch.Tensor = self.contract(nn.functional.silu(hidden))[0]
        return contracted


class LatentInput(nn.Module):
    """Linear l→d of the patch's latent; replicated over tensor-parallel ranks: [b, P, l] → [P, b, d]."""

    def __init__(self, config: TransformerConfig, latent_size: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.linear = nn.Linear(latent_size, config.hidden_size, dtype=config.params_dtype)
        for parameter in self.linear.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

        positions_first = latents.transpose(0, 1).to(self.linear.weight.dtype).contiguous()
        if self.sequence_parallel:
            positions_first = scatter_to_sequence_parallel_region(positions_first)
        projected: torch.Tensor = self.linear(positions_first)
        return projected
