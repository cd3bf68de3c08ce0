"""What `deterministic: true` sets, and that a training on it gives the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
REPORT = """
import json, os, sys
from calm_scale.runtime.torch_settings import set_deterministic
set_deterministic(sys.argv[1] == "yes")
assert "torch" in sys.modules or sys.argv[1] == "no"
import torch
from calm_scale.config.lm import BackboneConfig
from calm_scale.config.lm import ParallelConfig
from calm_scale.runtime.megatron import transformer_config
backbone = BackboneConfig(num_layers=2, hidden_size=32, num_heads=2, ffn_size=64, positions=8)
config = transformer_config(backbone, ParallelConfig(), "fp32", None, torch.device("cpu"))
print(json.dumps({
    "torch": torch.are_deterministic_algorithms_enabled(),
    "only_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    "megatron": config.deterministic_mode,
    "fills": torch.utils.deterministic.fill_uninitialized_memory,
    "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
    "flash_attention": torch.backends.cuda.flash_sdp_enabled(),
    "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    "transformer_engine": os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
    "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
    "touched": torch.cuda.is_initialized(),
}))
"""


def settings(wanted: str) -> dict[str, object]:
    env = os.environ | {"PYTHONPATH": str(REPO), "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    env.pop("CUBLAS_WORKSPACE_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-c", REPORT, wanted],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_library_is_told_before_a_device_is_touched() -> None:
    assert settings("yes") == {
        "torch": True,
        "only_warns": False,
        "megatron": True,
        "fills": False,
        "cudnn_attention": False,
        "flash_attention": True,
        "cublas": ":4096:8",
        "transformer_engine": "0",
        "nvls": "0",
        "touched": False,
    }


def test_nothing_is_changed_unasked() -> None:
    found = settings("no")
    assert (found["torch"], found["megatron"], found["cublas"]) == (False, False, None)
    assert found["transformer_engine"] == "1"


@pytest.mark.parametrize("stage", ["autoencoder", "lm"])
def test_a_training_sets_it_before_its_ranks_join(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from calm_scale.config import load
    from calm_scale.config.run_folder import Stage
    from calm_scale.stages import train

    class JoinedError(Exception):
        pass

    def joined(*_: object, **__: object) -> None:
        raise JoinedError

    wanted: list[bool] = []
    monkeypatch.setattr(train, "set_deterministic", wanted.append)
    monkeypatch.setattr(train, "joined", joined)
    with pytest.raises(JoinedError):
        train.train(load(REPO / "configs/runs/calm-m.yaml", ["deterministic=true"]), Stage(stage))
    assert wanted == [True]
