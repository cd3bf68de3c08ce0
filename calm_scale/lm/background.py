"""Writing a sharded checkpoint while training goes on: the same files, from a copy, in a thread of each rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calm_scale.lm.sharded import write_shards


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


class BackgroundWrite:
    """A write that goes on in the background. Its ranks talk through a process group of their own.

    The previous write from the same ``staging`` must have ended.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        values: Mapping[str, Any],
        directory: Path,
        group: dist.ProcessGroup,
        staging: Staging,
    ) -> None:
        self._error: BaseException | None = None
        copied = [staging.copy(shard) for shard in shards]
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
            write_shards(shards, values, directory, group)
        except BaseException as error:  # handed to whoever waits
            self._error = error
