"""Keyed noise: the same numbers for a position whatever the layout; independent streams; no global state."""

from __future__ import annotations

import pytest
import torch

from calm_scale.runtime.noise import BLOCK, PositionNoise

IDS = [7, 3, 12]
WHOLE = range(0, 3 * BLOCK + 5)


def _noise(ids=IDS, positions=WHOLE, seed=1, step=4, namespace="train"):
    return PositionNoise(seed, step, torch.tensor(ids), positions, namespace=namespace)


@pytest.mark.parametrize("start, stop", [(0, 5), (5, BLOCK), (BLOCK, 2 * BLOCK), (10, 3 * BLOCK + 5)])
def test_a_slice_of_positions_is_the_slice_of_the_whole(start, stop):
    whole, part = _noise(), _noise(positions=range(start, stop))
    for name in ("uniform", "normal"):
        a = getattr(whole, name)("head", 3, 4)
        b = getattr(part, name)("head", 3, 4)
        assert torch.equal(a[:, start:stop], b)
    assert torch.equal(whole.row_keys("x")[:, start:stop], part.row_keys("x"))


def test_micro_batches_draw_what_the_batch_draws():
    whole = _noise().normal("posterior", 6)
    split = torch.cat([_noise(ids=[i]).normal("posterior", 6) for i in IDS])
    assert torch.equal(whole, split)


@pytest.mark.parametrize("max_rows", [1, BLOCK, 40, 10_000])
def test_chunks_cover_the_rows_once_and_agree_with_the_whole(max_rows):
    noise = _noise()
    whole = noise.normal("posterior", 2, 4).view(-1, 2, 4)
    end = 0
    for chunk in noise.chunks(max_rows):
        assert chunk.rows.start == end
        end = chunk.rows.stop
        assert torch.equal(chunk.normal("posterior", 2, 4), whole[chunk.rows])
    assert end == whole.shape[0]


def test_every_part_of_the_key_makes_another_stream():
    reference = _noise().normal("a", 8)
    others = [
        _noise(seed=2).normal("a", 8),
        _noise(step=5).normal("a", 8),
        _noise(namespace="eval").normal("a", 8),
        _noise().normal("b", 8),
        _noise(ids=[8, 4, 13]).normal("a", 8),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([reference.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 0.12
    rows = reference.view(-1, 8)
    assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]
    keys = _noise(positions=range(0, 4096)).row_keys("a")
    assert torch.unique(keys).numel() == keys.numel() and (keys >= 0).all()


def test_the_laws_are_right():
    noise = PositionNoise(0, 0, list(range(20)), range(0, 256))
    u, z = noise.uniform("u", 16, low=-0.5, high=0.5), noise.normal("z", 16)
    assert u.min() >= -0.5 and u.max() < 0.5
    assert abs(u.mean()) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(z.mean()) < 0.015 and abs(z.var() - 1) < 0.02


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _noise().uniform("x", 4)
    assert torch.equal(before, torch.get_rng_state())


def test_a_strided_range_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        PositionNoise(0, 0, [1], range(0, 8, 2))
