"""The energy head: reference layout, shared-h form, noise that matters."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from calm_scale.config import ConfigError
from calm_scale.config.lm import LMStage
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import PositionNoise

D, L, NOISE = 12, 5, 7


def _head(**kwargs):
    torch.manual_seed(0)
    head = EnergyHead(D, L, num_blocks=2, noise_size=NOISE, num_samples=4, num_posterior=6, **kwargs)
    for p in head.parameters():  # away from the zero-initialised last layer and the identity norms
        torch.nn.init.normal_(p, std=0.4)
    return head


def _inputs(batch=2, positions=9):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(batch, positions, D, generator=g)
    mean, log_std = torch.randn(2, batch, positions, L, generator=g)
    return hidden, mean, log_std - 2, PositionNoise(0, 0, list(range(batch)), range(0, positions))


def _repeated(weights, hidden, noise):
    """The reference's form: h repeated for every sample and concatenated to x before one wide matrix."""

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    x = norm("norm_noise", linear("noise_embd", noise))
    h = hidden.unsqueeze(-2).expand(*noise.shape[:-1], -1)
    h = norm("norm_hidden", linear("hidden_embd", h))
    for j in range(2):
        block = f"mlp_blocks.{j}"
        y = F.silu(linear(f"{block}.linears.0", torch.cat([norm(f"{block}.in_ln", x), h], -1)))
        y = F.silu(linear(f"{block}.linears.2", y))
        gate, up = linear(f"{block}.linears.4", y).chunk(2, -1)
        x = x + linear(f"{block}.down_proj", F.silu(gate) * up)
    y = F.silu(linear("final_layer.linears.0", norm("final_layer.in_ln", x)))
    return linear("final_layer.linears.2", y)


def test_parameters_have_the_reference_names_and_shapes():
    head = EnergyHead(8, 3, num_blocks=1, noise_size=64)
    linears = {
        "noise_embd": (8, 64), "hidden_embd": (8, 8), "mlp_blocks.0.linears.0": (8, 16),
        "mlp_blocks.0.linears.2": (8, 8), "mlp_blocks.0.linears.4": (16, 8), "mlp_blocks.0.down_proj": (8, 8),
        "final_layer.linears.0": (8, 8), "final_layer.linears.2": (3, 8),
    }  # fmt: skip
    norms = ["norm_hidden", "norm_noise", "mlp_blocks.0.in_ln", "final_layer.in_ln"]
    want = {f"{n}.weight": s for n, s in linears.items()} | {f"{n}.bias": s[:1] for n, s in linears.items()}
    want |= {f"{n}.{part}": (8,) for n in norms for part in ("weight", "bias")}
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == want


def test_shared_h_equals_repeated_h_in_value_and_gradient():
    head = _head().double()
    hidden, *_ = _inputs()
    hidden = hidden.double().requires_grad_()
    noise = torch.rand(2, 9, 4, NOISE, dtype=torch.float64) - 0.5
    ours = head(hidden, noise)
    reference = _repeated(dict(head.named_parameters()), hidden, noise)
    torch.testing.assert_close(ours, reference)
    targets = [hidden, *head.parameters()]
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), targets),
        torch.autograd.grad((reference * weight).sum(), targets),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_fresh_head_puts_every_sample_at_zero():
    head = EnergyHead(D, L, num_blocks=1)
    out = head.sample(torch.randn(3, D), 5, torch.Generator().manual_seed(0))
    assert out.shape == (5, 3, L) and not out.any()


def test_samples_differ_between_draws_and_follow_the_generator():
    head, hidden = _head(), torch.randn(2, 3, D)
    out = head.sample(hidden, 6, torch.Generator().manual_seed(5))
    assert out.shape == (6, 2, 3, L)
    assert torch.unique(out.reshape(6, -1), dim=0).shape[0] == 6
    assert torch.equal(out, head.sample(hidden, 6, torch.Generator().manual_seed(5)))
    assert not torch.equal(out, head.sample(hidden, 6, torch.Generator().manual_seed(6)))


def test_noise_is_independent_across_the_samples_of_a_position():
    noise = PositionNoise(0, 0, range(8), range(64)).uniform("head", 4, NOISE, low=-0.5, high=0.5)
    correlation = torch.corrcoef(noise.permute(2, 0, 1, 3).reshape(4, -1)) - torch.eye(4)
    assert correlation.abs().max() < 0.06


def test_the_loss_of_a_slice_is_the_slice_of_the_loss():
    head = _head()
    hidden, mean, log_std, noise = _inputs(2, 40)
    whole = head.loss(hidden, mean, log_std, noise)
    assert whole.shape == (2, 40) and whole.dtype == torch.float32
    cut = slice(11, 30)
    part = PositionNoise(0, 0, [1], range(11, 30))
    sliced = head.loss(hidden[1:, cut], mean[1:, cut], log_std[1:, cut], part)
    torch.testing.assert_close(sliced, whole[1:, cut], rtol=1e-5, atol=1e-6)


def test_recompute_changes_memory_and_nothing_else():
    grads = []
    for recompute in (False, True):
        head = _head(recompute=recompute)
        head.loss(*_inputs()).mean().backward()
        grads.append([p.grad for p in head.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_bf16_weights_still_give_fp32_latents_and_losses():
    head = _head().bfloat16()
    hidden, mean, log_std, noise = _inputs()
    loss = head.loss(hidden.bfloat16(), mean, log_std, noise)
    loss.mean().backward()
    assert loss.dtype == torch.float32
    assert head.sample(hidden.bfloat16(), 2, torch.Generator()).dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in head.parameters())


def _stage(**head):
    return LMStage.model_validate(
        {
            "backbone": {"num_layers": 8, "hidden_size": 16, "ffn_size": 32, "num_heads": 2},
            "head": head,
            "training": {"steps": 1, "global_batch": 1},
        }
    )


def test_build_head_follows_the_config():
    stage = _stage(kind="energy", num_samples=3, num_posterior=5, alpha=1.5)
    head = stage.head.build(stage, latent_size=6)
    assert isinstance(head, EnergyHead)
    assert (len(head.mlp_blocks), head.num_samples, head.num_posterior, head.alpha) == (2, 3, 5, 1.5)
    assert (head.hidden_size, head.latent_size) == (16, 6)


def test_softmax_is_not_a_latent_head():
    stage = _stage(kind="softmax")
    with pytest.raises(ConfigError, match=r"lm\.head\.kind"):
        stage.head.build(stage, latent_size=6)
