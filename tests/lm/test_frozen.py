"""The frozen encoder's token table gives what the encoder gives."""

from __future__ import annotations

import pytest
import torch

from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
from calm_scale.config.autoencoder import AutoencoderModelConfig


@pytest.mark.parametrize("layers", [2, 4])
def test_table_encodes_like_the_encoder(layers: int) -> None:
    config = AutoencoderModelConfig(
        latent_size=8, hidden_size=16, ffn_size=40, encoder_layers=layers, decoder_layers=2, init_std=0.3
    )
    model = Autoencoder(config, vocab_size=5000, patch_size=3)
    frozen = FrozenAutoencoder(model)
    tokens = torch.randint(5000, (4, 6, 3), generator=torch.Generator().manual_seed(0))
    tokens[0, 0, 0] = 4999
    for ours, theirs in zip(frozen.encode(tokens), model.encode(tokens), strict=True):
        assert ours.shape == (4, 6, 8)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert not ours.requires_grad
    latents = torch.randn(4, 6, 8)
    assert torch.equal(frozen.decode_ids(latents), model.decode_ids(latents))
