"""The screened argmax against the plain one, where they are most likely to differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from calm_scale.autoencoder import model as model_module
from calm_scale.autoencoder.likeliest import LikeliestIds
from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
from calm_scale.config.autoencoder import AutoencoderModelConfig

WIDTH = 48
Embedding = Callable[[torch.Generator], torch.Tensor]


def spread(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1000, WIDTH, generator=generator)


def equal_in_bf16(generator: torch.Generator) -> torch.Tensor:
    """Each row stands eight times, apart by less than bf16 resolves and more than fp32 rounds."""
    rows = torch.randn(125, WIDTH, generator=generator).repeat(8, 1)
    return rows * (1 + 1e-4 * torch.arange(1000).float().unsqueeze(-1) / 1000)


def apart_by_the_last_bit(generator: torch.Generator) -> torch.Tensor:
    rows = torch.randn(500, WIDTH, generator=generator)
    return torch.cat([rows, rows.nextafter(torch.full_like(rows, torch.inf))])


def tied(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(100, WIDTH, generator=generator).repeat(10, 1)


def of_many_sizes(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1003, WIDTH, generator=generator) * torch.logspace(-3, 3, 1003).unsqueeze(-1)


def zero(generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(1000, WIDTH)


@pytest.mark.parametrize(
    "embedding", [spread, equal_in_bf16, apart_by_the_last_bit, tied, of_many_sizes, zero]
)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_ids_are_those_of_the_plain_product(embedding: Embedding, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = embedding(generator)
    noise = torch.randn(400, WIDTH, generator=generator)
    near = weight[torch.randint(len(weight), (400,), generator=generator)]
    likeliest = LikeliestIds(weight)
    for hidden in (noise, near, near + 0.1 * noise, near + near.roll(1, 0), torch.zeros(3, WIDTH)):
        scaled = size * hidden
        ids, plain = likeliest(scaled), F.linear(scaled, weight).argmax(-1)
        differ = (ids != plain).nonzero().squeeze(-1)
        # fp32 sums in another order may round an exact tie apart; any other difference is an error
        exact = (scaled.double() @ weight.double().T)[differ]
        gap = exact.gather(-1, plain[differ, None]) - exact.gather(-1, ids[differ, None])
        bound = WIDTH * 2.0**-23 * scaled[differ].norm(dim=-1) * weight.norm(dim=-1).max()
        assert (gap.squeeze(-1).abs() <= bound).all()
        if embedding is spread:
            assert len(differ) == 0


def test_the_screen_decides_without_the_plain_product_where_rows_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = spread(generator)
    near = weight[torch.randint(len(weight), (400,), generator=generator)]
    plain: list[int] = []
    linear = F.linear

    def counted(hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        plain.append(len(hidden) if len(matrix) == len(weight) else 0)
        return linear(hidden, matrix)

    monkeypatch.setattr(F, "linear", counted)
    LikeliestIds(weight)(near)
    assert sum(plain) == 0


@pytest.mark.parametrize("fast", [False, True])
def test_a_frozen_autoencoder_decodes_the_same_ids_either_way(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    used: list[bool] = []
    monkeypatch.setattr(model_module, "screening_pays", lambda _: used.append(fast) or fast)
    config = AutoencoderModelConfig(hidden_size=32, ffn_size=64, latent_size=16)
    model = Autoencoder(config, vocab_size=600, patch_size=4)
    latents = torch.randn(3, 70, model.latent_size, generator=torch.Generator().manual_seed(1))
    ids = FrozenAutoencoder(model).decode_ids(latents)
    assert torch.equal(ids, model.decode_ids(latents))
    assert used
