"""The patch autoencoder (paper §2): K tokens ↔ one latent vector of size l, without context beyond the patch.

Parameter names and shapes are those of the published checkpoints, so importing one is a plain copy. The decoder
holds the token embedding a second time as ``lm_head_weight``: the same Parameter, not a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from calm_scale.autoencoder.cross_entropy import slice_rows, tied_cross_entropy
from calm_scale.autoencoder.likeliest import LikeliestIds, screening_pays
from calm_scale.config.autoencoder import AutoencoderModelConfig

TIED_ALIAS = "decoder.lm_head_weight"
_TABLE_ROWS = 4096
_SCREENED_ROWS = 256
"""Tokens decoded at once on a CPU through ``LikeliestIds``; fewer in all do not pay for it."""


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """bf16 and fp16 become fp32; fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, computed in fp32 or wider and returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., a] → [..., a]."""
        wide = at_least_fp32(x)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) · up(x)), no biases."""

    def __init__(self, size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, ffn_size, bias=False)
        self.up_proj = nn.Linear(size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., a] → [..., a]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm residual feed-forward block: x + SwiGLU(RMSNorm(x))."""

    def __init__(self, config: AutoencoderModelConfig) -> None:
        super().__init__()
        self.mlp = SwiGLU(config.hidden_size, config.ffn_size)
        self.layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., a] → [..., a]."""
        out: torch.Tensor = x + self.mlp(self.layernorm(x))
        return out


class Encoder(nn.Module):
    """Half of the blocks run per token, the other half on the squeezed patch."""

    def __init__(self, config: AutoencoderModelConfig, vocab_size: int, patch_size: int) -> None:
        super().__init__()
        a, l = config.hidden_size, config.latent(patch_size)
        self.embed_tokens = nn.Embedding(vocab_size, a)
        self.encoder_layers = nn.ModuleList(Block(config) for _ in range(config.encoder_layers))
        self.squeeze_layer = nn.Linear(patch_size * a, a)
        self.norm = RMSNorm(a, config.norm_eps)
        self.hidden_to_latent = nn.Linear(a, 2 * l)

    @property
    def token_embedding(self) -> nn.Parameter:
        """[V, a]: what the decoder shares."""
        return cast(nn.Parameter, self.embed_tokens.weight)

    def forward(
        self, tokens: torch.Tensor, blank: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` [..., K] → mean and log σ, fp32 [..., l].

        ``blank`` (bool [..., K]) marks tokens whose embedding is replaced by zeros.
        """
        x = self.embed_tokens(tokens)
        if blank is not None:
            x = x.masked_fill(blank.unsqueeze(-1), 0.0)
        half = len(self.encoder_layers) // 2
        for block in self.encoder_layers[:half]:
            x = block(x)
        x = self.squeeze_layer(x.flatten(-2))
        for block in self.encoder_layers[half:]:
            x = block(x)
        mean, log_std = at_least_fp32(self.hidden_to_latent(self.norm(x))).chunk(2, dim=-1)
        return mean, log_std


class Decoder(nn.Module):
    """Mirror of the encoder; logits go through the tied token embedding, without a bias."""

    def __init__(self, config: AutoencoderModelConfig, patch_size: int, embedding: nn.Parameter) -> None:
        super().__init__()
        a = config.hidden_size
        self.patch_size = patch_size
        self.lm_head_weight = embedding
        self.latent_to_hidden = nn.Linear(config.latent(patch_size), a)
        self.decoder_layers = nn.ModuleList(Block(config) for _ in range(config.decoder_layers))
        self.expand_layer = nn.Linear(a, patch_size * a)
        self.norm = RMSNorm(a, config.norm_eps)

    def forward(
        self,
        latents: torch.Tensor,
        targets: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``latents`` [..., l] → logits [..., K, V].

        With ``targets`` (int64 [..., K]) and ``counted`` (bool [..., K]): the summed cross-entropy and the number
        of correct argmaxes instead, without holding all logits.
        """
        hidden = self.token_states(latents)
        if targets is None or counted is None:
            return F.linear(hidden, self.lm_head_weight)
        return tied_cross_entropy(hidden, self.lm_head_weight, targets, counted)

    def token_states(self, latents: torch.Tensor) -> torch.Tensor:
        """[..., l] → [..., K, a]: everything before the vocabulary."""
        x = self.latent_to_hidden(latents)
        half = len(self.decoder_layers) // 2
        for block in self.decoder_layers[:half]:
            x = block(x)
        x = self.expand_layer(x).unflatten(-1, (self.patch_size, -1))
        for block in self.decoder_layers[half:]:
            x = block(x)
        return cast(torch.Tensor, self.norm(x))


class Autoencoder(nn.Module):
    """q(z | K tokens) = N(mean, diag σ²) and its decoder.

    Args:
        config: widths and depths.
        vocab_size: V; logits have exactly V columns.
        patch_size: K.
        seed: the weights are a function of (config, V, K, seed); torch's global generator is left alone.
    """

    def __init__(
        self, config: AutoencoderModelConfig, vocab_size: int, patch_size: int, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.patch_size = patch_size
        self.latent_size = config.latent(patch_size)
        with torch.random.fork_rng(devices=[]):
            self.encoder = Encoder(config, vocab_size, patch_size)
            self.decoder = Decoder(config, patch_size, self.encoder.token_embedding)
        self._initialize(torch.Generator().manual_seed(seed))

    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` int64 [..., K] → (mean, log_std), fp32 [..., l] each."""
        out: tuple[torch.Tensor, torch.Tensor] = self.encoder(tokens)
        return out

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [..., l] → logits [..., K, V]."""
        out: torch.Tensor = self.decoder(latents)
        return out

    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [..., l] → the most likely ids, int64 [..., K]. Logits are held for a slice at a time."""
        rows = latents.flatten(0, -2)
        step = max(1, slice_rows(self.vocab_size, latents.device.type) // self.patch_size)
        ids = [self.decode(part).argmax(dim=-1) for part in rows.split(step)]
        out: torch.Tensor = torch.cat(ids).unflatten(0, latents.shape[:-1])
        return out

    def reconstruction(
        self, latents: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross-entropy (nats) of counted ``targets`` int64 [..., K], and how many argmaxes are right."""
        out: tuple[torch.Tensor, torch.Tensor] = self.decoder(latents, targets, counted)
        return out

    def unique_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters, the tied embedding once (under the encoder's name)."""
        return self.named_parameters(remove_duplicate=True)

    def retie(self) -> None:
        """Make the decoder's output weight the encoder's embedding again (after weights were replaced)."""
        self.decoder.lm_head_weight = self.encoder.token_embedding

    def _initialize(self, generator: torch.Generator) -> None:
        for name, parameter in self.unique_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.init_std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class FrozenAutoencoder:
    """``encode`` and ``decode_ids`` of an autoencoder in evaluation mode; its weights must not change any more.

    Before the squeeze the encoder looks at one token at a time, so for frozen weights that half is a function of the
    token id alone. Computing it once for all V ids and looking it up replaces most of the encoder's arithmetic in every
    step of the language model. It is exact up to the rounding of differently shaped matrix products. The table takes
    V · d_AE numbers in the weights' type and is made at the first ``encode``. Many latents at once are decoded by
    ``LikeliestIds`` where that is faster.
    """

    def __init__(self, model: Autoencoder) -> None:
        self.model = model.eval()
        self.patch_size, self.vocab_size = model.patch_size, model.vocab_size
        self.latent_size = model.latent_size
        self._table: torch.Tensor | None = None
        self._likeliest: LikeliestIds | None = None

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` int64 [..., K] → (mean, log_std), fp32 [..., l] each."""
        encoder = self.model.encoder
        if self._table is None:
            self._table = self._per_token()
        half = len(encoder.encoder_layers) // 2
        x = encoder.squeeze_layer(F.embedding(tokens, self._table).flatten(-2))
        for block in encoder.encoder_layers[half:]:
            x = block(x)
        mean, log_std = at_least_fp32(encoder.hidden_to_latent(encoder.norm(x))).chunk(2, dim=-1)
        return mean, log_std

    @torch.no_grad()
    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [..., l] → the most likely ids, int64 [..., K]."""
        rows = latents.flatten(0, -2)
        weight = self.model.decoder.lm_head_weight
        if len(rows) * self.patch_size < _SCREENED_ROWS or not screening_pays(weight):
            return self.model.decode_ids(latents)
        if self._likeliest is None:
            self._likeliest = LikeliestIds(weight)
        step = max(_SCREENED_ROWS, slice_rows(self.vocab_size, weight.device.type)) // self.patch_size
        states = (self.model.decoder.token_states(part) for part in rows.split(max(1, step)))
        ids = [self._likeliest(state.flatten(0, 1)) for state in states]
        return torch.cat(ids).view(*latents.shape[:-1], self.patch_size)

    def _per_token(self) -> torch.Tensor:
        """[V, d_AE]: every token's embedding after the blocks before the squeeze."""
        encoder = self.model.encoder
        half = len(encoder.encoder_layers) // 2
        table = torch.empty_like(encoder.token_embedding)
        for rows, out in zip(
            encoder.token_embedding.split(_TABLE_ROWS), table.split(_TABLE_ROWS), strict=True
        ):
            x: torch.Tensor = rows
            for block in encoder.encoder_layers[:half]:
                x = block(x)
            out.copy_(x)
        return table
