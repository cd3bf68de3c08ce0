"""Published weights ↔ our sharded checkpoints, a tensor at a time: no model is built, no layout matters.

A checkpoint is global tensors by key, so one process writes what any TP × PP × DP layout reads, and reads what any
layout wrote. Memory holds the tensor at hand, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calm_scale.interop.files import InteropError
from calm_scale.interop.language_model import PublishedLanguageModel
from calm_scale.lm.sharded import MODEL_PREFIX, stored_shapes, write_shards

if TYPE_CHECKING:
    from torch import Tensor


def write_checkpoint(published: PublishedLanguageModel, directory: Path) -> None:
    """Writes the weights (no optimizer state) as a sharded checkpoint that every layout reads.

    Needs an initialised process group of one rank. ``directory`` must exist and be empty.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shards = []
    for key, shape, dtype in published.shapes():
        outline = torch.empty((), dtype=dtype).expand(shape)  # of that shape, without its memory
        shards.append(ShardedTensor.from_rank_offsets(MODEL_PREFIX + key, outline, replica_id=0))
    write_shards(shards, {}, directory, make=lambda key: published.weight(key.removeprefix(MODEL_PREFIX)))


def whole_from_checkpoint(directory: Path) -> Callable[[str], Tensor]:
    """Global key → whole tensor, read from a checkpoint of any layout when asked for; no process group needed.

    Raises:
        InteropError: on use, for a key the checkpoint does not hold.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    stored_shapes(directory)  # looks through the index for foreign code before it is trusted
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata().state_dict_metadata

    def whole(key: str) -> Tensor:
        found = metadata.get(MODEL_PREFIX + key)
        if not isinstance(found, TensorStorageMetadata):
            raise InteropError(f"{directory} holds no weight {key}: it is the checkpoint of another model")
        tensor = torch.empty(found.size, dtype=found.properties.dtype)
        load({MODEL_PREFIX + key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return whole
