"""Copies of the shards of a checkpoint, to be written while training goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


class Staging:
    """Host memory for the copies, kept from save to save: fresh memory costs several times the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def copy(self, shard: Any) -> Any:
        """The shard with its data in this staging; valid until the next copy of the same shard."""
        data = shard.data.detach()
        place = (shard.key, tuple(shard.global_offset))
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = self._buffers[place] = torch.empty(data.shape, dtype=data.dtype, device="cpu")
        return replace(shard, data=buffer.copy_(data))
