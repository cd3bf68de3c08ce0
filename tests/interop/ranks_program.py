"""Imports a published folder on two gloo ranks, TP 2 then PP 2: ``ranks_program.py FOLDER RANK``.

Rank 0 compares every tensor of the checkpoints the two layouts wrote with the published ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from calm_scale.config.lm import ParallelConfig
from calm_scale.interop.language_model import PublishedLanguageModel, whole_from_checkpoint
from calm_scale.lm.build import build_models
from calm_scale.lm.pieces import pieces_of
from calm_scale.lm.sharded import model_shard, write_shards
from calm_scale.runtime.megatron import initialize


def main():
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))
    published = PublishedLanguageModel(folder / "theirs", folder / "ae")
    for name, parallel in (("tp2", ParallelConfig(tensor=2)), ("pp2", ParallelConfig(pipeline=2))):
        stage = published.run.lm.model_copy(update={"parallel": parallel})
        layout = initialize(parallel, world)
        models = build_models(published.run.model_copy(update={"lm": stage}), layout, "fp32")
        published.fill(models)
        target = folder / name
        target.mkdir(exist_ok=True)
        dist.barrier()
        write_shards([model_shard(p, is_main=True) for p in pieces_of(models)], {}, target)
        dist.barrier()
        if rank == 0:
            whole = whole_from_checkpoint(target)
            for key, weight in published.weights():
                assert torch.equal(whole(key), weight), f"{name}: {key}"
    print("equal")


if __name__ == "__main__":
    main()
