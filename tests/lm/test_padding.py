"""Padding is no target: positions before a patch of padding weigh nothing, and the mean is over the others."""

from __future__ import annotations

import torch

from calm_scale.lm.targets import position_weights


def test_without_padding_only_the_last_position_is_left_out() -> None:
    weights = position_weights(torch.arange(12).view(2, 6), 2, None)
    assert weights.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_a_patch_of_padding_is_no_target_but_a_partial_one_is() -> None:
    pad = 9
    tokens = torch.tensor(
        [[1, 2, pad, pad, 3, pad, 4, 5, pad, pad]]
    )  # patches: text, pad, partial, text, pad
    assert position_weights(tokens, 2, pad).tolist() == [[0, 1, 1, 0, 0]]


def test_the_first_patch_never_counts_as_a_target() -> None:
    pad = 0
    tokens = torch.tensor([[pad, pad, 1, 2, 3, 4]])
    assert position_weights(tokens, 2, pad).tolist() == [[1, 1, 0]]
