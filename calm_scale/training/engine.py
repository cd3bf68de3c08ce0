"""What the loop and an engine say to each other, and what both engines use: DeepSpeed ZeRO and Megatron-core."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Batch:
    """One data-parallel rank's share of the global batch of a step.

    Attributes:
        step: the optimizer step this batch is for, counted from 1.
        tokens: int64 ``[A, b, S]``, A micro-batches of b sequences of S tokens.
        sample_ids: int64 ``[A, b]``, the index of every sequence in the global sample stream. It does not
            depend on the layout, so noise keyed by it is the same in every layout.
        counted: bool ``[A, b]``, the sequences that count; None: all. The others only fill the last batch of an
            evaluation.
    """

    step: int
    tokens: torch.Tensor
    sample_ids: torch.Tensor
    counted: torch.Tensor | None = None


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same values on every rank, means over positions of the *global* batch.

    ``skipped``: a gradient was not finite, so no rank changed a parameter or an optimizer state.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One trained model on all ranks. Every rank makes every call, in the same order.

    Attributes:
        data_rank, data_size: whose share of the global batch this rank reads.
        pipeline_rank: ranks with the same one do the same work.
        place: this rank's position in the layout, for messages, e.g. ``tensor 1, pipeline stage 0, data 2``; empty
            where the rank's number says it.
    """

    data_rank: int
    data_size: int
    pipeline_rank: int

    @property
    def place(self) -> str: ...

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """Forward, backward, clip, update. Skips the update on all ranks when a gradient is not finite."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Means over the counted sequences, the same on every rank. Changes no training state and no training noise."""
        ...

    def save(self, directory: Path) -> list[str]:
        """Every rank writes its shards into an existing folder; returns the names of the files it wrote.

        The store fsyncs, lists and renames.
        """
        ...

    def save_async(self, directory: Path) -> Future[list[str]]:
        """As ``save``, but only copies the state now and writes the copy later: training may go on changing it.

        The future's calls do not communicate between ranks. It must be done before the next ``save_async``.
        """
        ...

    def load(self, directory: Path) -> None:
        """Every rank reads its shards from a verified folder, whatever layout wrote them."""
        ...

    def is_finite(self) -> bool:
        """Every parameter on every rank is finite; the same answer on every rank."""
        ...


def all_agree(ok: bool, device: torch.device) -> bool:
    """Whether every rank says yes."""
    flag = torch.tensor([1.0 if ok else 0.0], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item() > 0)


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Tell the optimizer that it has made ``count`` updates. The parameters' moments must exist.

    A count that is there keeps its type. An optimizer that is not torch's own and keeps none yet gets an integer per
    group.
    """
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = _like(state["step"], count)
    is_torch = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for group in optimizer.param_groups:
        if not is_torch or "step" in group:
            group["step"] = _like(group.get("step", 0), count)


def no_steps(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """The count of a parameter of which the optimizer keeps no state yet, in torch's form."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def _like(present: Any, count: int) -> Any:
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, count)
    return type(present)(count)
