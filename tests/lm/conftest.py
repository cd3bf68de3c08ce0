"""Lets the tests of this room import their helpers by name, and runs the cases on ranks once for all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every case of ``lm_cases`` reported and saved."""
    from lm_cases import run_all
    from lm_ranks import Reports

    out = tmp_path_factory.mktemp("lm")
    run_all(out)
    return Reports(out)
