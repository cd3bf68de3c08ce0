"""A text depends on the seed and its prompt, not on the prompts beside it."""

from __future__ import annotations

import pytest
import torch

from calm_scale.config.evaluation import GenerationConfig
from calm_scale.lm.heads.denoising.module import DiffusionHead, FlowHead
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import RowStreams
from calm_scale.sampling.generate import generate

CPU = torch.device("cpu")
RULES = [
    {"algorithm": "plain"},
    {"algorithm": "batch", "temperature": 0.5},
    {"algorithm": "exact", "temperature": 0.7, "draw_budget": 7},
    {"algorithm": "exact", "temperature": 1 / 3, "draw_budget": 60},
]


def texts(script, letters, prompts, **settings):
    config = GenerationConfig(max_new_tokens=40, num_candidates=12, seed=4, **settings)
    done = generate(script(26, 4, slip=0.5), letters, prompts, config)
    return [c.text for c in done.completions]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_neighbours_order_and_batch_size_change_no_text(script, letters, rule):
    lengths = (9, 4, 30, 6, 17, 5, 8, 8, 4)
    prompts = [[(5 * number + i) % 26 for i in range(n)] for number, n in enumerate(lengths)]
    alone = [texts(script, letters, [prompt], **rule)[0] for prompt in prompts]
    assert len(set(alone)) > len(prompts) // 2
    for size in (1, 2, 16):
        assert texts(script, letters, prompts, batch_size=size, **rule) == alone
        assert texts(script, letters, prompts[::-1], batch_size=size, **rule) == alone[::-1]


def test_equal_prompts_get_texts_of_their_own(script, letters):
    prompt = list(range(8))
    repeated = texts(script, letters, [prompt] * 4, algorithm="plain")
    assert len(set(repeated)) > 1
    mixed = texts(script, letters, [prompt, [5] * 9, prompt, prompt, prompt], algorithm="plain")
    assert [mixed[0], *mixed[2:]] == repeated


@pytest.mark.parametrize(
    "head",
    [
        EnergyHead(8, 6, num_blocks=1, noise_size=5),
        FlowHead(8, 6, num_blocks=1),
        DiffusionHead(8, 6, num_blocks=1, sampling_steps=4),
    ],
    ids=str,
)
def test_a_row_draws_the_same_latents_in_any_batch(head):
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    hidden = torch.randn(3, 8, generator=generator)
    with torch.no_grad():
        together = head.sample(hidden, 2, RowStreams.seeded([7, 8, 9], CPU))
        last = head.sample(hidden[2:], 2, RowStreams.seeded([9], CPU))
    torch.testing.assert_close(together[:, 2:], last, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[0], together[1])
