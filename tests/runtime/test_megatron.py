"""Setting Megatron up: optional packages that are broken, and the limits of its groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ASK = """
import sys
from calm_scale.runtime.megatron import has_transformer_engine
print(has_transformer_engine(), has_transformer_engine())
import megatron.core.models.gpt.gpt_layer_specs as specs
print("HAVE_TE", specs.HAVE_TE)
"""


@pytest.mark.parametrize(
    "error", ["OSError('libtransformer_engine.so: undefined symbol')", "AssertionError('no .so found')"]
)
def test_a_broken_transformer_engine_is_named_once_and_hidden_from_megatron(
    error: str, tmp_path: Path
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(f"raise {error}\n")
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "HAVE_TE", "False"]
    kind, message = error.partition("(")[0], error.split("'")[1]
    assert done.stderr.count(f"cannot be imported ({kind}: {message})") == 1


def test_every_group_has_the_same_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from megatron.core import parallel_state

    from calm_scale.config.lm import ParallelConfig
    from calm_scale.runtime import megatron
    from calm_scale.runtime.world import COLLECTIVE_SECONDS, World

    asked: dict[str, object] = {}

    class StopHereError(Exception):
        pass

    def initialize(**values: object) -> None:
        asked.update(values)
        raise StopHereError

    monkeypatch.setattr(megatron, "_ensure_default_group", lambda _: None)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", initialize)
    with pytest.raises(StopHereError):
        megatron.initialize(ParallelConfig(), World(0, 1, 0, 1, torch.device("cpu"), "gloo"))
    assert asked["distributed_timeout_minutes"] == COLLECTIVE_SECONDS / 60
