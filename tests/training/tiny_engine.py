"""A real engine in forty lines: plain torch, data parallel over gloo, keyed noise, sharded state."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from calm_scale.runtime.world import World
from calm_scale.training.engine import Batch, StepResult


class TinyEngine:
    """An embedding and a linear layer that predict the next token, trained with AdamW and weight noise.

    ``bad_steps``: a gradient becomes Inf on the last rank at these steps. ``slow_save``/``slow_step``/``slow_eval``:
    seconds each takes, so that a test can hit it; ``slow_rank``: only there a step takes them. ``stops_at``: the last
    rank stops (SIGSTOP) inside this step.
    """

    place = ""
    pipeline_rank = 0

    def __init__(
        self,
        world: World,
        vocab: int = 64,
        width: int = 8,
        bad_steps: Iterable[int] = (),
        slow_save: float = 0.0,
        slow_step: float = 0.0,
        slow_eval: float = 0.0,
        slow_rank: int | None = None,
        stops_at: int | None = None,
    ) -> None:
        self.world, self.stops_at = world, stops_at
        slow_step *= slow_rank in (None, world.rank)
        self.data_rank, self.data_size = world.rank, world.world_size
        self.bad_steps, self.slow_save, self.slow_step, self.slow_eval = (
            set(bad_steps),
            slow_save,
            slow_step,
            slow_eval,
        )
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(vocab, width, generator=generator) * 0.1)
        self.out = torch.nn.Parameter(torch.randn(width, vocab, generator=generator) * 0.1)
        self.parameters = {"embed": self.embed, "out": self.out}
        self.moments = {
            f"{name}.{kind}": torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
            for kind in ("first", "second")
        }
        self.updates = 0
        self.writer = ThreadPoolExecutor(1)
        self.seen: list[list[int]] = []

    def _loss(self, batch: Batch, noisy: bool) -> torch.Tensor:
        tokens = batch.tokens.flatten(0, 1)
        hidden = self.embed[tokens[:, :-1]]
        if noisy:
            draws = []
            for sample in batch.sample_ids.flatten().tolist():
                generator = torch.Generator().manual_seed(batch.step * 1_000_003 + sample)
                draws.append(torch.randn(hidden.shape[1:], generator=generator))
            hidden = hidden + 0.1 * torch.stack(draws)
        logits = hidden @ self.out
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        if self.world.world_size > 1:
            dist.all_reduce(value)
        return value / self.world.world_size

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        time.sleep(self.slow_step)
        if batch.step == self.stops_at and self.world.rank == self.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.seen.append(batch.sample_ids.flatten().tolist())
        loss = self._loss(batch, noisy=True)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        if batch.step in self.bad_steps and self.world.rank == self.world.world_size - 1:
            gradients[1][0, 0] = float("inf")
        gradients = [self._mean(gradient) for gradient in gradients]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        finite = bool(torch.isfinite(norm))
        if finite:
            self._update(gradients, lr, min(1.0, 1.0 / (norm.item() + 1e-6)))
        return StepResult(self._mean(loss.detach().clone()).item(), norm.item(), skipped=not finite)

    @torch.no_grad()
    def _update(self, gradients: list[torch.Tensor], lr: float, scale: float) -> None:
        """AdamW by hand: torch's own optimizers import its compiler, seconds for every process."""
        self.updates += 1
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            first, second = self.moments[f"{name}.first"], self.moments[f"{name}.second"]
            first.lerp_(gradient * scale, 0.1)
            second.lerp_((gradient * scale) ** 2, 0.05)
            direction = first / (1 - 0.9**self.updates) / ((second / (1 - 0.95**self.updates)).sqrt() + 1e-8)
            parameter.sub_(lr * (direction + 0.1 * parameter))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        losses = []
        for batch in batches:
            time.sleep(self.slow_eval)
            losses.append(self._mean(self._loss(batch, noisy=False).clone()).item())
        return {"loss": sum(losses) / len(losses)}

    def state(self) -> dict[str, torch.Tensor]:
        parameters = {name: parameter.detach() for name, parameter in self.parameters.items()}
        state = {name: value.clone() for name, value in (parameters | self.moments).items()}
        return state | {"updates": torch.tensor(self.updates)}

    def _write(self, directory: Path, state: dict[str, torch.Tensor]) -> list[str]:
        mine = {
            k: v for i, (k, v) in enumerate(sorted(state.items())) if i % self.data_size == self.data_rank
        }
        path = directory / f"rank_{self.data_rank}.safetensors"
        path.write_bytes(b"half")
        time.sleep(self.slow_save)
        save_file(mine, path)
        return [path.name]

    def save(self, directory: Path) -> list[str]:
        return self._write(directory, self.state())

    def save_async(self, directory: Path) -> Future[list[str]]:
        return self.writer.submit(self._write, directory, self.state())

    def load(self, directory: Path) -> None:
        state: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("rank_*.safetensors")):
            state |= load_file(path)
        with torch.no_grad():
            for name, value in (self.parameters | self.moments).items():
                value.copy_(state[name])
        self.updates = int(state["updates"])

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.embed).all() and torch.isfinite(self.out).all())
