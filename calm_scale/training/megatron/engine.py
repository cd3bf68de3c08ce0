"""The language-model engine: Megatron's DDP, pipeline schedules and optimizer behind the loop's small Protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
from calm_scale.config import ConfigError, RunConfig
from calm_scale.lm.build import build_models
from calm_scale.lm.model import CalmModel
from calm_scale.lm.sharded import Staging, write_shards
from calm_scale.lm.targets import LatentCodec, input_latents, next_patch_targets, position_weights
from calm_scale.runtime.host_copies import sent
from calm_scale.runtime.megatron import Layout, initialize
from calm_scale.runtime.noise import Namespace
from calm_scale.runtime.world import COLLECTIVE_SECONDS, World
from calm_scale.training.engine import Batch, StepResult, all_agree
from calm_scale.training.megatron.optimizer import (
    MegatronOptimizer,
    check_replicas,
    finalize_gradients,
    wrap_data_parallel,
)
from calm_scale.training.megatron.state import (
    load_training_state,
    plain_values,
    snapshot,
)

MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""tokens [b, S], sample_ids [b], which of them count [b] (None: all)."""


class MegatronEngine:
    """Trains one language model on all ranks of the world.

    Args:
        run: the run; ``run.lm`` says what is trained and how it is laid out.
        world: this process among all.
        codec: the frozen autoencoder on this rank's device, in evaluation mode; None for the
            autoregressive baseline.
        pad_id: token id that is padding: a position whose next patch is nothing else does not count. None when
            the data holds no padding.

    Attributes:
        data_rank, data_size, pipeline_rank: see ``Engine``.
        steps: optimizer steps taken (skipped ones not counted).
    """

    def __init__(
        self, run: RunConfig, world: World, codec: LatentCodec | None, pad_id: int | None = None
    ) -> None:
        stage = run.require_lm()
        self._run, self._pad_id = run, pad_id
        self._codec = FrozenAutoencoder(codec) if isinstance(codec, Autoencoder) else codec
        self.layout: Layout = initialize(stage.parallel, world)
        self.data_rank = self.layout.data_rank
        self.data_size = self.layout.data_size
        self.pipeline_rank = self.layout.pipeline_rank
        _check(run, self.layout, codec)
        self.models: list[CalmModel] = build_models(run, self.layout)
        shards_optimizer = stage.parallel.distributed_optimizer and self.data_size > 1
        overlap = stage.parallel.overlap
        overlap = self.layout.device.type == "cuda" if overlap is None else overlap
        self.chunks = wrap_data_parallel(self.models, distributed_optimizer=shards_optimizer, overlap=overlap)
        self.optimizer = MegatronOptimizer.create(
            self.chunks,
            stage.training.optimizer,
            stage.training.precision,
            distributed_optimizer=shards_optimizer,
            overlap=overlap,
        )
        _connect(self.models, self.chunks, self.layout)
        self.steps = 0
        self._writers: dist.ProcessGroup | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._staging = Staging()

    @property
    def place(self) -> str:
        """Where this rank stands, for the watchdog's messages."""
        at = self.layout
        return f"tensor {at.tensor_rank}, pipeline stage {at.pipeline_rank}, data {at.data_rank}"

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step on this rank's share [A, b, S] of the global batch.

        When loss or gradient norm is not finite no rank updates anything and the result says ``skipped``.
        """
        for model in self.models:
            model.train()
        self.optimizer.zero_grad()
        loss = self._pass(batch, forward_only=False, namespace="train", step=batch.step)
        norm = self.optimizer.global_norm()
        if not all_agree(math.isfinite(loss) and math.isfinite(norm), self.layout.device):
            return StepResult(loss=loss, grad_norm=norm, skipped=True)
        self.optimizer.update(lr, norm)
        self.steps += 1
        return StepResult(loss=loss, grad_norm=norm, skipped=False)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean loss per position over the batches. Its noise is the same at every evaluation of the run."""
        for model in self.models:
            model.eval()
        self.optimizer.gather_weights()
        total, count = 0.0, 0
        for batch in batches:
            num_positions = self._num_positions(batch)
            total += num_positions * self._pass(batch, forward_only=True, namespace="eval", step=0)
            count += num_positions
        self._check_replicas_if_asked()
        if count == 0:
            raise ConfigError(
                "evaluation got no position to score: the first lm.training.eval_samples held-out sequences hold none"
            )
        return {"loss": total / count}

    def _pass(self, batch: Batch, *, forward_only: bool, namespace: Namespace, step: int) -> float:
        """Run the pipeline schedule over the micro-batches; the mean loss per position of the global batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        tokens = sent(batch.tokens, self.layout.device)
        num_micro_batches, size, length = tokens.shape
        num_positions = length // self._run.patch_size
        scale = 1.0 / max(1, self._num_positions(batch))
        counted = [None] * num_micro_batches if batch.counted is None else list(batch.counted)
        micro_batches = [iter(list(zip(tokens, batch.sample_ids, counted, strict=True))) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=partial(self._forward, scale=scale, namespace=namespace, step=step),
            data_iterator=micro_batches if len(self.chunks) > 1 else micro_batches[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=num_micro_batches,
            seq_length=num_positions,
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return self._sum_over_world(losses)

    def _num_positions(self, batch: Batch) -> int:
        """Positions of the global batch that count in the loss."""
        if self._pad_id is None and batch.counted is None:
            num_micro_batches, size, length = batch.tokens.shape
            return num_micro_batches * size * self.data_size * (length // self._run.patch_size - 1)
        weights = position_weights(batch.tokens, self._run.patch_size, self._pad_id)
        if batch.counted is not None:
            weights = weights * batch.counted[..., None]
        count = sent(weights.sum(dtype=torch.float64), self.layout.device)
        dist.all_reduce(count, group=self.layout.data_group)
        return int(count.item())

    def _forward(
        self,
        micro_batches: Iterator[MicroBatch],
        chunk: Any,
        *,
        scale: float,
        namespace: Namespace,
        step: int,
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        """One micro-batch through one stage, in the form Megatron's schedules want."""
        tokens, sample_ids, counted = next(micro_batches)
        model: CalmModel = chunk.module
        latents = input_latents(model, self._codec, tokens)
        if not model.post_process:
            return chunk(tokens, latents), None
        targets, weights = next_patch_targets(
            model,
            self._codec,
            self.layout,
            tokens,
            sample_ids,
            seed=self._run.seed,
            step=step,
            namespace=namespace,
            pad_id=self._pad_id,
        )
        if counted is not None:
            weights = weights * sent(counted, weights.device)[:, None]
        return chunk(tokens, latents, targets), partial(_weighted_sum, weights=weights, scale=scale)

    def _sum_over_world(self, losses: Sequence[torch.Tensor]) -> float:
        """Add the parts of the loss that this rank owns over all ranks; identical everywhere."""
        total = torch.zeros(1, dtype=torch.float64, device=self.layout.device)
        owns_part = self.models[-1].splits_positions or self.layout.tensor_rank == 0
        if self.layout.is_last_stage and owns_part:
            total += torch.stack([loss.double() for loss in losses]).sum()
        dist.all_reduce(total)
        return float(total.item())

    def save(self, directory: Path) -> list[str]:
        """Write this rank's shards of weights and optimizer state; returns the files' names."""
        self.optimizer.gather_weights()
        self._check_replicas_if_asked()
        return write_shards(self._snapshot(live=True), plain_values(self.steps), directory)

    def save_async(self, directory: Path) -> Future[list[str]]:
        """Copy this rank's shards now and write the copy in the background. Every rank calls it.

        The copy's CPU memory is kept for the next save; an earlier write must have ended. The checkpoint is the same
        as ``save``'s.
        """
        self.optimizer.gather_weights()
        self._check_replicas_if_asked()
        if self._writers is None:
            self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
        copied = self._snapshot(live=False)
        return self._writer.submit(write_shards, copied, plain_values(self.steps), directory, self._writers)

    def _snapshot(self, *, live: bool) -> list[Any]:
        """This rank's shards in host memory: copies, or, where ``live`` and on the CPU, the tensors themselves."""
        if live and self.layout.device.type == "cpu":
            return snapshot(self.models, self.optimizer, self.layout)
        copied = snapshot(self.models, self.optimizer, self.layout, self._staging.copy)
        self._staging.finish()
        return copied

    def load(self, directory: Path) -> None:
        """Read weights and optimizer state, whatever layout wrote them.

        Raises:
            CheckpointMismatchError: a key is missing, unexpected or of another shape.
        """
        self.steps = load_training_state(self.models, self.optimizer, self.layout, directory)

    def _check_replicas_if_asked(self) -> None:
        if self._run.require_lm().parallel.check_replicas:
            check_replicas(self.models, self.layout)

    def is_finite(self) -> bool:
        """Whether every parameter on every rank is finite."""
        self.optimizer.gather_weights()
        ok = all(bool(torch.isfinite(p).all()) for model in self.models for p in model.parameters())
        return all_agree(ok, self.layout.device)


def _weighted_sum(
    loss: torch.Tensor, *, weights: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-position losses [b, p] → this micro-batch's part of the global mean (with Megatron's token count)."""
    part = (loss * weights).sum() * scale
    return part, torch.zeros((), dtype=torch.int, device=loss.device), part.detach().clone()


def _connect(models: Sequence[CalmModel], chunks: Sequence[Any], layout: Layout) -> None:
    """Tell Megatron's schedules how to delay and finish the gradient reduction of these stages."""
    config = models[0].config
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.finalize_model_grads_func = finalize_gradients(layout)


def _check(run: RunConfig, layout: Layout, codec: LatentCodec | None) -> None:
    """Refuse at start what would fail or hang later."""
    stage = run.require_lm()
    try:
        stage.micro_batches(layout.data_size)
    except ValueError as error:
        raise ConfigError(f"lm: {error}") from None
    if codec is None and not stage.predicts_tokens:
        raise ConfigError(
            f"lm.head.kind {stage.head.kind} is trained against a frozen autoencoder: none was given"
        )
