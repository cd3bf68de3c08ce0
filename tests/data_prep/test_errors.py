"""An error keeps its type and what follows from it when another process of the prep gets it."""

from __future__ import annotations

import pickle

import pytest

from calm_scale.config.errors import CalmScaleError
from data_prep.errors import (
    CorruptSourceError,
    EncoderMismatchError,
    PrepError,
    ShardError,
    SourceError,
    StarvedSplitError,
)


@pytest.mark.parametrize(
    ("error", "exit_code", "may_pass"),
    [
        (PrepError("a"), 1, True),
        (PrepError("b", mistake=True), 2, False),
        (SourceError("c", mistake=True), 2, False),
        (CorruptSourceError("d"), 1, False),
        (ShardError("e"), 1, False),
        (StarvedSplitError("f"), 2, False),
        (EncoderMismatchError("g", "tiktoken"), 1, False),
    ],
)
def test_an_error_is_the_same_in_another_process(
    error: CalmScaleError, exit_code: int, may_pass: bool
) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
    assert (again.exit_code, again.may_pass) == (exit_code, may_pass)
