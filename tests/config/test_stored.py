"""Documents that are read back: a damaged one is a message."""

from __future__ import annotations

import pytest

from calm_scale.config import ConfigError
from calm_scale.config.stored import read_object


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\xff", "[1]", "1" * 5000])
def test_a_damaged_document_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config.json: is damaged.*; download it again"):
        read_object(path, remedy="download it again")
