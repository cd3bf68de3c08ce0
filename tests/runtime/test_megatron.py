"""Setting Megatron up: optional packages that are broken, and the limits of its groups."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from calm_scale.config.lm import BackboneConfig
from calm_scale.runtime import fast_kernels

REPO = Path(__file__).resolve().parents[2]
ASK = """
import sys
from calm_scale.runtime.fast_kernels import has_transformer_engine
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


FUSED = fast_kernels.FastKernels(transformer_engine=True, triton=True)
BACKBONE = BackboneConfig(
    num_layers=2, hidden_size=32, ffn_size=64, num_heads=4, num_query_groups=2, positions=8
)


@pytest.mark.parametrize(
    ("kernels", "rope", "in_layers", "in_own"),
    [
        (fast_kernels.NONE, False, False, False),
        (FUSED, True, True, False),
        (replace(FUSED, apex_weight_gradient=True), True, True, True),
        (fast_kernels.FastKernels(apex_weight_gradient=True), False, True, True),
    ],
)
def test_a_gpu_takes_the_fast_kernels_that_are_there(
    kernels: fast_kernels.FastKernels,
    rope: bool,
    in_layers: bool,
    in_own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Built for a GPU, which building the configuration does not need."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from calm_scale.config.lm import ParallelConfig
    from calm_scale.runtime.megatron import for_own_linears, transformer_config

    monkeypatch.setattr(fast_kernels, "found", lambda: kernels)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    gpu = torch.device("cuda")
    config = transformer_config(BACKBONE, ParallelConfig(), "bf16", None, gpu)
    assert (config.apply_rope_fusion, config.gradient_accumulation_fusion) == (rope, in_layers)
    assert for_own_linears(config).gradient_accumulation_fusion == in_own
    assert config.bias_activation_fusion
    assert config.bias_dropout_fusion
    for inference in (
        transformer_config(BACKBONE, ParallelConfig(), "bf16", None, gpu, for_inference=True),
        transformer_config(BACKBONE, ParallelConfig(), "bf16", None, torch.device("cpu")),
    ):
        assert not inference.apply_rope_fusion
        assert not inference.gradient_accumulation_fusion
    assert not transformer_config(BACKBONE, ParallelConfig(), "fp32", None, gpu).gradient_accumulation_fusion


def test_what_is_missing_is_said_with_its_cost() -> None:
    assert fast_kernels.missing(FUSED) == []
    engine, norm, triton = fast_kernels.missing(fast_kernels.NONE, 1.314)
    assert "a step is estimated to take 1.31 times as long" in engine
    assert "two kernels for each weight" in norm
    assert "Triton is not there" in triton
    assert len(fast_kernels.missing(replace(FUSED, triton=False))) == 1
    (apex_only,) = fast_kernels.missing(
        fast_kernels.FastKernels(apex=True, apex_weight_gradient=True, triton=True)
    )
    assert "estimated" not in apex_only
    assert "written once more" not in apex_only
