"""The objective against closed forms and a slow form written from the paper's formulas."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.autoencoder.objective import (
    SUMS,
    PatchNoise,
    TrainingObjective,
    clipped_kl,
    draw_noise,
    gaussian_kl,
    objective_value,
)
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.runtime.noise import PositionNoise

V, K, L = 23, 3, 5
SIZES = AutoencoderModelConfig(hidden_size=8, ffn_size=12, latent_size=L, init_std=0.3)
NONE = PatchNoise(None, None, None)


@pytest.fixture
def model() -> Autoencoder:
    return Autoencoder(SIZES, V, K, seed=3).double()


def tokens(batch: int = 2, patches: int = 4) -> torch.Tensor:
    return torch.randint(1, V, (batch, patches, K), generator=torch.Generator().manual_seed(0))


def noise(config: ObjectiveConfig, batch: int = 2, patches: int = 4, step: int = 1) -> PatchNoise:
    return draw_noise(config, K, L, PositionNoise(7, step, range(batch), range(patches)))


def slow_loss(
    model: Autoencoder, config: ObjectiveConfig, ids: torch.Tensor, valid: torch.Tensor, drawn: PatchNoise
) -> float:
    """K · mean CE over valid tokens + β · mean over valid patches of Σ_j max(λ, KL_j), one patch at a time."""
    ce, kl, num_tokens, num_patches = 0.0, 0.0, 0, 0
    for b in range(ids.shape[0]):
        for p in range(ids.shape[1]):
            seen = ids[b, p].clone()
            if drawn.dropped_tokens is not None:
                seen[drawn.dropped_tokens[b, p]] = 0
            mean, log_std = model.encode(seen)
            z = mean.clone()
            for j in range(L):
                if drawn.posterior is not None:
                    z[j] = mean[j] + math.exp(log_std[j]) * drawn.posterior[b, p, j]
                if drawn.kept_latents is not None:
                    keep = bool(drawn.kept_latents[b, p, j])
                    z[j] = z[j] / (1 - config.latent_dropout) if keep else 0.0
            logits = model.decode(z)
            for k in range(K):
                if valid[b, p, k]:
                    ce += float(torch.logsumexp(logits[k], 0) - logits[k, ids[b, p, k]])
                    num_tokens += 1
            if valid[b, p].any():
                num_patches += 1
                for j in range(L):
                    mu, var = float(mean[j]), math.exp(2 * log_std[j])
                    kl += max(config.kl_floor, 0.5 * (mu * mu + var - 1 - math.log(var)))
    return K * ce / num_tokens + config.kl_weight * kl / num_patches


CASES = {
    "reconstruction": ObjectiveConfig(
        posterior="deterministic", kl_weight=0, kl_floor=0, token_dropout=0, latent_dropout=0
    ),
    "kl": ObjectiveConfig(kl_weight=0.3, kl_floor=0, token_dropout=0, latent_dropout=0),
    "kl-clip": ObjectiveConfig(kl_weight=0.3, kl_floor=0.2, token_dropout=0, latent_dropout=0),
    "token-dropout": ObjectiveConfig(kl_weight=0.3, kl_floor=0.2, token_dropout=0.4, latent_dropout=0),
    "latent-dropout": ObjectiveConfig(kl_weight=0.3, kl_floor=0.2, token_dropout=0, latent_dropout=0.4),
    "both": ObjectiveConfig(kl_weight=0.3, kl_floor=0.2, token_dropout=0.4, latent_dropout=0.4),
}


@pytest.mark.parametrize("row", CASES)
def test_loss_equals_the_slow_form_for_every_row_of_table_2(model: Autoencoder, row: str) -> None:
    config, ids = CASES[row], tokens()
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, 3], valid[1, 1, 1:] = False, False
    drawn = noise(config)
    num_tokens, num_patches = int(valid.sum()), int(valid.any(-1).sum())
    loss, sums = TrainingObjective(model, config)(ids, valid, drawn, 1 / num_tokens, 1 / num_patches)
    assert float(loss) == pytest.approx(slow_loss(model, config, ids, valid, drawn), rel=1e-6)
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    means = named["cross_entropy"] / num_tokens, named["clipped_kl"] / num_patches
    assert objective_value(config, K, *means) == pytest.approx(float(loss), rel=1e-6)


def test_kl_is_the_divergence_from_the_standard_normal() -> None:
    mean, log_std = torch.randn(40, L, dtype=torch.float64), torch.randn(40, L, dtype=torch.float64)
    q = torch.distributions.Normal(mean, log_std.exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    assert torch.allclose(gaussian_kl(mean, log_std), torch.distributions.kl_divergence(q, p), rtol=1e-10)
    assert float(gaussian_kl(torch.zeros(1), torch.zeros(1))) == 0.0


def test_a_dimension_below_the_floor_contributes_the_floor_and_no_gradient() -> None:
    mean = torch.tensor([0.1, 2.0], requires_grad=True)
    log_std = torch.tensor([0.05, -1.0], requires_grad=True)
    value = clipped_kl(mean, log_std, 0.5)
    value.backward()
    high = 0.5 * (4 + math.exp(-2) - 1) + 1
    assert value.item() == pytest.approx(0.5 + high)
    assert mean.grad is not None and log_std.grad is not None
    assert mean.grad.tolist() == pytest.approx([0.0, 2.0])
    assert log_std.grad.tolist() == pytest.approx([0.0, math.exp(-2) - 1])


def test_padding_does_not_touch_loss_or_gradients(model: Autoencoder) -> None:
    config, ids = CASES["both"], tokens()
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, 2:] = False
    objective = TrainingObjective(model, config)

    def run(ids: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        loss, _ = objective(ids, valid, noise(config), 0.1, 0.2)
        loss.backward()
        return float(loss), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    other = ids.clone()
    other[1, 2:] = 5
    (loss, gradients), (other_loss, other_gradients) = run(ids), run(other)
    assert loss == pytest.approx(other_loss, rel=1e-12)
    assert all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-14) for a, b in zip(gradients, other_gradients, strict=True)
    )


def test_a_dropped_token_becomes_id_zero_or_a_zero_embedding(model: Autoencoder) -> None:
    ids = tokens()
    dropped = torch.zeros_like(ids, dtype=torch.bool)
    dropped[:, :, 1] = True
    drawn = PatchNoise(None, dropped, None)
    valid = torch.ones_like(ids, dtype=torch.bool)
    plain = {"posterior": "deterministic", "kl_weight": 0, "latent_dropout": 0}
    by_id = TrainingObjective(model, ObjectiveConfig(**plain, masked_token="id_zero"))
    by_zero = TrainingObjective(model, ObjectiveConfig(**plain, masked_token="zero_embedding"))
    with torch.no_grad():
        first, second = by_id(ids, valid, drawn, 1, 1)[0], by_zero(ids, valid, drawn, 1, 1)[0]
        assert not torch.allclose(first, second)
        model.encoder.token_embedding[0] = 0.0
        first = TrainingObjective(model, by_id.config)(ids.clamp(min=1), valid, drawn, 1, 1)[0]
        second = TrainingObjective(model, by_zero.config)(ids.clamp(min=1), valid, drawn, 1, 1)[0]
    assert torch.allclose(first, second)


def test_drop_rates_are_as_configured_and_noise_follows_the_sample() -> None:
    config = ObjectiveConfig(token_dropout=0.15, latent_dropout=0.3)
    drawn = draw_noise(config, K, 64, PositionNoise(1, 5, range(16), range(64)))
    assert drawn.dropped_tokens is not None and drawn.kept_latents is not None and drawn.posterior is not None
    assert float(drawn.dropped_tokens.float().mean()) == pytest.approx(0.15, abs=0.03)
    assert float(drawn.kept_latents.float().mean()) == pytest.approx(0.7, abs=0.01)
    alone = draw_noise(config, K, 64, PositionNoise(1, 5, [9], range(64)))
    assert torch.equal(alone.posterior[0], drawn.posterior[9])  # type: ignore[index]
    assert torch.equal(alone.dropped_tokens[0], drawn.dropped_tokens[9])  # type: ignore[index]
    later = draw_noise(config, K, 64, PositionNoise(1, 6, [9], range(64)))
    assert not torch.equal(alone.posterior, later.posterior)  # type: ignore[arg-type]


def test_encoding_and_decoding_never_drop(model: Autoencoder) -> None:
    ids = tokens()
    with torch.no_grad():
        first = model.decode(model.encode(ids)[0])
        model.train()
        again = model.decode(model.encode(ids)[0])
    assert torch.equal(first, again)


def test_bf16_products_keep_an_fp32_loss() -> None:
    small = Autoencoder(SIZES, V, K, seed=3)
    ids = tokens()
    valid = torch.ones_like(ids, dtype=torch.bool)
    config = CASES["both"]
    full, _ = TrainingObjective(small, config)(ids, valid, noise(config), 1 / 24, 1 / 8)
    half, _ = TrainingObjective(small, config, autocast=torch.bfloat16)(
        ids, valid, noise(config), 1 / 24, 1 / 8
    )
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(full), rel=2e-2)
    assert float(half) != float(full)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="set kl_weight: 0"):
        ObjectiveConfig(posterior="deterministic")
    with pytest.raises(ValidationError, match="encoder_layers 3 is odd"):
        AutoencoderModelConfig(encoder_layers=3)
