"""What holds for every head: it learns a two-mode law on a toy, its loss is layout-free, its noise keyed."""

from __future__ import annotations

import pytest
import torch

from calm_scale.config.lm import LMStage
from calm_scale.lm.heads.atoms.module import AtomHead
from calm_scale.lm.heads.denoising.module import DiffusionHead, FlowHead, cosine_alpha_bar
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import PositionNoise

HEADS = {
    "energy": lambda d, l: EnergyHead(d, l, num_blocks=1, noise_size=16, num_samples=8, num_posterior=8),
    "atoms": lambda d, l: AtomHead(d, l, num_atoms=8, num_posterior=4),
    "flow": lambda d, l: FlowHead(d, l, num_blocks=2, num_repeats=4, sampling_steps=8),
    "diffusion": lambda d, l: DiffusionHead(d, l, num_blocks=2, num_repeats=4, sampling_steps=50),
}
MODES = torch.tensor([[1.0, 0.5], [-0.8, 0.3]])


def _train(head, steps, lr):
    """Two contexts; context c takes mode 0 with probability 0.8 or 0.3. The posterior of a patch is one mode."""
    hidden_of = torch.eye(head.hidden_size)[:2] * 2
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    g = torch.Generator().manual_seed(0)
    batch = 64
    for step in range(steps):
        context = torch.randint(0, 2, (1, batch), generator=g)
        first = torch.rand(1, batch, generator=g) < torch.where(context == 0, 0.8, 0.3)
        mean = MODES[(~first).long()]
        noise = PositionNoise(0, step, [step], range(batch))
        loss = head.loss(hidden_of[context], mean, torch.full_like(mean, -2.0), noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return hidden_of


@pytest.mark.parametrize(
    "kind, steps, lr",
    [("energy", 400, 3e-3), ("atoms", 400, 3e-3), ("flow", 400, 5e-3), ("diffusion", 500, 5e-3)],
)
def test_learns_two_modes_with_the_right_frequencies(kind, steps, lr):
    torch.manual_seed(0)
    head = HEADS[kind](32, 2)
    hidden = _train(head, steps, lr)
    with torch.no_grad():
        out = head.sample(hidden, 1000, torch.Generator().manual_seed(1))
    distance = (out[:, :, None] - MODES).norm(dim=-1)
    close = distance.min(-1).values < 0.5
    share = (distance.argmin(-1) == 0).float().mean(0)
    assert close.float().mean() > 0.9
    assert abs(share[0] - 0.8) < 0.08 and abs(share[1] - 0.3) < 0.08


@pytest.mark.parametrize("kind", HEADS)
def test_interface_shapes_and_layout_independence(kind):
    head = HEADS[kind](12, 5)
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 37, 12, generator=g)
    mean, log_std = torch.randn(2, 2, 37, 5, generator=g)
    whole = head.loss(hidden, mean, log_std - 2, PositionNoise(0, 3, [4, 9], range(37)))
    part = PositionNoise(0, 3, [9], range(10, 30))
    sliced = head.loss(hidden[1:, 10:30], mean[1:, 10:30], log_std[1:, 10:30] - 2, part)
    assert whole.shape == (2, 37) and whole.dtype == torch.float32
    torch.testing.assert_close(sliced, whole[1:, 10:30], rtol=1e-5, atol=1e-5)
    out = head.sample(hidden, 3, torch.Generator().manual_seed(2))
    assert out.shape == (3, 2, 37, 5)
    assert torch.equal(out, head.sample(hidden, 3, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("kind", HEADS)
def test_same_generator_same_weights(kind):
    heads = [HEADS[kind](8, 3) for _ in range(2)]
    for head in heads:
        head.reset_parameters(0.02, torch.Generator().manual_seed(7))
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", HEADS)
def test_bf16_weights_train_and_sample(kind):
    head = HEADS[kind](8, 3).bfloat16()
    hidden = torch.randn(1, 4, 8).bfloat16()
    noise = PositionNoise(0, 0, [0], range(4))
    loss = head.loss(hidden, torch.randn(1, 4, 3), torch.zeros(1, 4, 3), noise)
    loss.mean().backward()
    assert loss.dtype == torch.float32
    assert head.sample(hidden, 2, torch.Generator()).dtype == torch.float32


@pytest.mark.parametrize("kind, cls", [("flow", FlowHead), ("diffusion", DiffusionHead)])
def test_build_head_makes_the_other_heads(kind, cls):
    stage = LMStage.model_validate(
        {
            "backbone": {"num_layers": 8, "hidden_size": 16, "ffn_size": 32, "num_heads": 2},
            "head": {"kind": kind, "num_repeats": 3, "sampling_steps": 7},
            "training": {"steps": 1, "global_batch": 1},
        }
    )
    head = stage.head.build(stage, latent_size=6)
    assert isinstance(head, cls) and (head.num_repeats, head.sampling_steps) == (3, 7)
    assert len(head.net.blocks) == 2


def test_the_cosine_schedule_goes_from_data_to_noise():
    alpha_bar = cosine_alpha_bar(1000)
    assert alpha_bar[0] > 0.999 and alpha_bar[-1] < 1e-4
    assert (alpha_bar[1:] < alpha_bar[:-1]).all()


def test_flow_sampler_integrates_a_known_field():
    """v = −x has x(1) = x(0)·e^(−1): the midpoint rule with n steps gives (1 − s + s²/2)^n, s = 1/n."""
    head = FlowHead(4, 3, num_blocks=1, sampling_steps=5)
    head.net.forward = lambda x, time, condition: -x
    g = torch.Generator().manual_seed(3)
    out = head.sample(torch.zeros(6, 4), 2, g)
    start = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(3)).movedim(-2, 0)
    torch.testing.assert_close(out, start * (1 - 0.2 + 0.02) ** 5)
