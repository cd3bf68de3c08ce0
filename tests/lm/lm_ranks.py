"""Cases run on gloo ranks in separate processes, many per process, and what they reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")


def tiny_run(
    *,
    head: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    input_mode: str = "discrete",
    **parallel: Any,
) -> dict[str, Any]:
    """A run small enough for a test; V = 101 divides by nothing, init is wide so that every gradient is large."""
    head = head or {"kind": "energy", "num_samples": 4, "num_posterior": 5, "noise_size": 8}
    optimizer = {"lr": 1e-3, "clip_norm": 0.05, **(training or {}).pop("optimizer", {})}
    return {
        "name": "tiny",
        "vocab_size": 101,
        "patch_size": 1 if head["kind"] == "softmax" else 2,
        "autoencoder": {"model": {"latent_size": 8}, "training": {"steps": 1, "global_batch": 1}},
        "lm": {
            "backbone": {
                "num_layers": 4,
                "hidden_size": 32,
                "ffn_size": 64,
                "num_heads": 4,
                "num_query_groups": 2,
                "positions": 8,
                "init_std": 0.2,
            },
            "head": head,
            "input_mode": input_mode,
            "training": {
                "steps": 10,
                "global_batch": 4,
                "precision": "fp32",
                "optimizer": optimizer,
                **(training or {}),
            },
            "parallel": {"pipeline_layout": "even", **parallel},
        },
    }


def run_ranks(
    worlds: Sequence[tuple[int, Sequence[dict[str, Any]]]], out: Path, timeout: float = 500
) -> None:
    """Run the cases of each world on that many gloo ranks; every rank must succeed within the limit."""
    path = out / "worlds.json"
    path.write_text(json.dumps(worlds))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(path), str(out), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(max(world_size for world_size, _ in worlds))
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        if rank.returncode:
            pytest.fail(f"rank {ranks.index(rank)} failed:\n{output[-4000:]}")


class Reports:
    """What the cases reported, by name; ``out`` also holds the checkpoints they saved."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __getitem__(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"{name}.json").read_text())
        return found

    def tensors(self, name: str) -> dict[str, Any]:
        """Every tensor of a saved checkpoint, by key."""
        import torch
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        loaded = _load_state_dict_from_keys(storage_reader=FileSystemReader(self.out / name))
        return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
