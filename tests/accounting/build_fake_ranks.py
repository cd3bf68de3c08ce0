"""Build the stages of chosen ranks of a large world in one process, with torch's fake process group.

Arguments: pairs of a configuration and a world size. Prints ``built {json}``: stage and parameters by rank.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from calm_scale.config import load
from calm_scale.lm.build import build_models
from calm_scale.runtime.megatron import initialize
from calm_scale.runtime.world import World


def build(path: str, world_size: int) -> dict[str, object]:
    config = load(path)
    assert config.lm is not None
    found: dict[int, tuple[int, int]] = {}
    stage_size = world_size // config.lm.parallel.pipeline
    ranks = {
        0,
        world_size - 1,
        *(stage * stage_size + stage_size // 2 for stage in range(world_size // stage_size)),
    }
    for rank in sorted(ranks):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        world = World(rank, world_size, rank % 8, 8, torch.device("cpu"), "fake")
        layout = initialize(config.lm.parallel, world)
        models = build_models(config, layout)
        found[layout.pipeline_rank] = (rank, sum(p.numel() for m in models for p in m.parameters()))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {"name": config.name, "stages": found}


if __name__ == "__main__":
    for config_path, size in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print("built", json.dumps(build(config_path, int(size))), flush=True)
