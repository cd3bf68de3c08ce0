"""Writing a sharded checkpoint while training goes on: the same files, from a copy, in a thread of each rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class BackgroundWrite:
    """A write that goes on in the background. Its ranks talk through a process group of their own."""

    def __init__(
        self, shards: Sequence[Any], values: Mapping[str, Any], directory: Path, group: dist.ProcessGroup
    ) -> None:
        self._error: BaseException | None = None
        copied = [replace(shard, data=shard.data.detach().cpu().clone()) for shard in shards]
        self._thread = threading.Thread(
            target=self._run, args=(copied, dict(values), directory, group), name="checkpoint-writer"
        )
        self._thread.start()

    def done(self) -> bool:
        """The files of this rank are written, or the writer failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until done; raise what the writer raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(
        self, shards: Sequence[Any], values: dict[str, Any], directory: Path, group: dist.ProcessGroup
    ) -> None:
        try:
            _write(shards, values, directory, group)
        except BaseException as error:  # handed to whoever waits
            self._error = error


def _write(shards: Sequence[Any], values: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """The layout of files that ``dist_checkpointing`` reads: torch's sharded files, common.pt, metadata.json."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    by_key: dict[str, list[Any]] = {}
    for shard in shards:
        if is_main_replica(shard.replica_id):
            by_key.setdefault(shard.key, []).append(shard)
    save(
        mcore_to_pyt_state_dict(by_key, False),
        storage_writer=FileSystemWriter(directory),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )
    if dist.get_rank(group) == 0:
        torch.save({"values": values}, directory / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
