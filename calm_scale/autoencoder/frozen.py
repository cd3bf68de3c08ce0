"""The autoencoder when it no longer changes: the per-token half of the encoder becomes a table.

Before the squeeze the encoder looks at one token at a time, so for frozen weights that half is a function of the
token id alone. Computing it once for all V ids and looking it up replaces most of the encoder's arithmetic in every
step of the language model. It is exact up to the rounding of differently shaped matrix products.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from calm_scale.autoencoder.model import Autoencoder, at_least_fp32

_ROWS = 4096


class FrozenAutoencoder:
    """``encode`` and ``decode_ids`` of an autoencoder in evaluation mode; its weights must not change any more.

    The table takes V · d_AE numbers in the weights' type and is made at the first ``encode``.
    """

    def __init__(self, model: Autoencoder) -> None:
        self.model = model.eval()
        self.patch_size, self.vocab_size = model.patch_size, model.vocab_size
        self.latent_size = model.latent_size
        self._table: torch.Tensor | None = None

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
        return self.model.decode_ids(latents)

    def _per_token(self) -> torch.Tensor:
        """[V, d_AE]: every token's embedding after the blocks before the squeeze."""
        encoder = self.model.encoder
        half = len(encoder.encoder_layers) // 2
        table = torch.empty_like(encoder.token_embedding)
        for rows, out in zip(encoder.token_embedding.split(_ROWS), table.split(_ROWS), strict=True):
            x: torch.Tensor = rows
            for block in encoder.encoder_layers[:half]:
                x = block(x)
            out.copy_(x)
        return table
