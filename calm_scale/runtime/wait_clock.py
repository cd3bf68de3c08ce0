"""How long a rank waits in collectives during a block of code.

While the clock runs, the calls of torch's process groups, and the waits for their results, are replaced by ones that
measure themselves; outside of the block nothing is. On a GPU the time is that of the device, between two events of its
current stream, which is waited for only when the sum is read; on a CPU it is that of the caller.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_CALLS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "scatter",
    "send",
    "_end_coalescing",
)
"""Methods of a process group that run a collective, or begin one; some have other names in other versions of torch."""


class WaitClock:
    """Adds up the waits of this process's collectives, in whatever thread: keep it from blocks with others' beside."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures the block. Blocks of one process follow each other."""
        calls = [(dist.ProcessGroup, name) for name in _CALLS if name in vars(dist.ProcessGroup)]
        replaced = [(owner, name, vars(owner)[name]) for owner, name in (*calls, (dist.Work, "wait"))]
        for owner, name, _ in replaced:
            setattr(owner, name, self._measured(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, entry in replaced:
                setattr(owner, name, entry)

    def seconds(self) -> float:
        """What was waited so far. On a GPU this returns when the device has done what was queued."""
        if self._events:
            torch.cuda.synchronize()
        milliseconds = [float(begin.elapsed_time(end)) for begin, end in self._events]
        return self._seconds + sum(milliseconds) / 1000

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        measure = self._on_device if self._on_gpu else self._on_host

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            return measure(call, *args, **kwargs)

        return measured

    def _on_host(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._seconds += time.perf_counter() - start

    def _on_device(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*args, **kwargs)
        end.record()
        self._events.append((begin, end))
        return result
