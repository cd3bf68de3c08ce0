"""The layers between token ids and hidden states: embedding, input compressor, the baseline's output layer.

Vocabularies of any size V are split, whether tensor parallelism divides V or not: rows are padded up to the next
multiple of the tensor-parallel size. A padded row is never looked up (ids are < V), never scored (its logit is −∞)
and never stored: the checkpoint holds exactly V rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from calm_scale.lm.backbone import LayerNorm

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def padded_size(vocab_size: int, tensor_size: int) -> int:
    """The next multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor_size) * tensor_size


class VocabularyEmbedding(nn.Module):
    """Ids [b, P, ...] → embeddings [P, b, ..., d]; with sequence parallelism, this rank's slice of the P positions."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_parallel = config.sequence_parallel
        self.table = VocabParallelEmbedding(
            padded_size(vocab_size, config.tensor_model_parallel_size),
            config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up; ids must be in [0, V)."""
        embedded: torch.Tensor = self.table(ids if self.sequence_parallel else ids.transpose(0, 1))
        return embedded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The V true rows only."""
        key = f"{prefix}table.weight"
        return unpadded_shard(key, self.table.weight, self.vocab_size)


class VocabularyOutput(nn.Module):
    """The autoregressive baseline's output layer, split over the vocabulary: [P, b, d] → this rank's logits."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_parallel = config.sequence_parallel
        self.linear = ColumnParallelLinear(
            config.hidden_size,
            padded_size(vocab_size, config.tensor_model_parallel_size),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [P, b, V_padded / TP], fp32; padded columns are −∞ and get no gradient."""
        logits: torch.Tensor = self.linear(hidden)[0].float()
        num_rows = logits.shape[-1]
        num_true = _true_rows(self.vocab_size, num_rows)
        if num_true == num_rows:
            return logits
        padded = torch.arange(num_rows, device=logits.device) >= num_true
        return logits.masked_fill(padded, float("-inf"))

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [P, b, V] of the true vocabulary, gathered from the tensor-parallel ranks."""
        from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

        logits: torch.Tensor = gather_from_tensor_model_parallel_region(self(hidden))
        return logits[..., : self.vocab_size]

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy [b, P] of target ids [b, P], computed without gathering the logits."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = self(hidden)
        loss: torch.Tensor = vocab_parallel_cross_entropy(logits, targets.transpose(0, 1).contiguous())
        return loss.transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The V true rows only."""
        return unpadded_shard(f"{prefix}linear.weight", self.linear.weight, self.vocab_size)


def unpadded_shard(key: str, weight: torch.Tensor, vocab_size: int) -> dict[str, Any]:
    """This rank's part of a [V, d] tensor in Megatron's checkpoint terms; ranks may hold unequal parts."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    num_rows = weight.shape[0]
    num_true = _true_rows(vocab_size, num_rows)
    if num_true == 0:
        return {}
    data = weight.detach()[:num_true]
    start = parallel_state.get_tensor_model_parallel_rank() * num_rows
    replica = (0, 0, parallel_state.get_data_parallel_rank())
    shard = ShardedTensor(
        key, data, data.dtype, tuple(data.shape), (vocab_size, data.shape[1]), (start, 0), None, replica
    )
    return {key: shard}


def _true_rows(vocab_size: int, num_rows: int) -> int:
    """How many of this rank's ``num_rows`` rows are real tokens."""
    from megatron.core import parallel_state

    start = int(parallel_state.get_tensor_model_parallel_rank()) * num_rows
    return max(0, min(num_rows, vocab_size - start))


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
