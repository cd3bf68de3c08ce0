"""The autoencoder's engine: DeepSpeed ZeRO 0–3 on gloo/CPU or NCCL/CUDA behind the loop's ``Engine`` protocol.

Losses and gradients are means over the valid tokens and patches of the *global* batch: every micro-batch is
weighted by the global counts, and the weights cancel DeepSpeed's own averaging over ranks and accumulation.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calm_scale.autoencoder.metrics import AutoencoderReport, ReportSums
from calm_scale.autoencoder.model import Autoencoder
from calm_scale.autoencoder.objective import SUMS, TrainingObjective, draw_noise, objective_value
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.errors import CalmScaleError, ConfigError
from calm_scale.runtime.host_copies import sent
from calm_scale.runtime.noise import PositionNoise
from calm_scale.runtime.world import World
from calm_scale.training.deepspeed.setup import build_optimizer, deepspeed_config
from calm_scale.training.deepspeed.state import ZeroState
from calm_scale.training.engine import Batch, StepResult, all_agree


class DeepSpeedEngine:
    """Trains one autoencoder over all ranks of the world (every rank is a data-parallel rank).

    Args:
        stage: the run's autoencoder section.
        vocab_size: V.
        patch_size: K.
        seed: of the weights and of all noise.
        world: the ranks. A world of one gets a process group of its own.
        pad_id: token id that is padding (never a target, never counted); None when every token counts.

    Raises:
        ConfigError: the ranks are not those of ``zero.data``, or the global batch does not divide over them.

    Attributes:
        config: the DeepSpeed JSON that is used, for the log and the run folder.
        last_report: the full report of the latest ``evaluate`` (per-dimension σ, noise curve), or None.
    """

    place = ""
    pipeline_rank = 0

    def __init__(
        self,
        stage: AutoencoderStage,
        *,
        vocab_size: int,
        patch_size: int,
        seed: int,
        world: World,
        pad_id: int | None = None,
    ) -> None:
        _check_layout(stage, world)
        deepspeed = _import_deepspeed(world)
        self.data_rank, self.data_size = world.rank, world.world_size
        self.last_report: AutoencoderReport | None = None
        self._stage, self._seed, self._pad_id, self._device = stage, seed, pad_id, world.device
        self._patch_size, self._vocab_size = patch_size, vocab_size
        self._updates = 0
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        model = Autoencoder(stage.model, vocab_size, patch_size, seed=seed).to(world.device)
        self._model = model
        parameters = dict(model.unique_parameters())
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.num_parameters = sum(p.numel() for p in parameters.values())
        self.config = deepspeed_config(stage, world.world_size, self.num_parameters)
        optimizer, integer_step = build_optimizer(stage, model, world.device)
        bf16 = torch.bfloat16 if stage.training.precision == "bf16" else None
        self._engine, *_ = deepspeed.initialize(
            model=TrainingObjective(model, stage.objective, autocast=bf16),
            optimizer=optimizer,
            config=self.config,
            dist_init_required=False if _deepspeed_comm_ready() else None,
        )
        self._state = ZeroState(self._engine, parameters, shapes, integer_step=integer_step)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step on the global batch; see ``Engine``. ``lr`` holds for this step."""
        patches, valid = self._patches(batch.tokens)
        num_micro = patches.shape[0]
        num_tokens, num_patches = self._global_counts(valid)
        scale = float(self.data_size * num_micro)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._device)
        for micro in range(num_micro):
            noise = self._noise(batch.step, batch.sample_ids[micro], patches.shape[2])
            drawn = draw_noise(self._stage.objective, self._patch_size, self._model.latent_size, noise)
            loss, part = self._engine(
                patches[micro], valid[micro], drawn, scale / num_tokens, scale / num_patches
            )
            self._engine.backward(loss)
            self._engine.step()
            sums += part
        dist.all_reduce(sums)
        applied = bool(self._engine.was_step_applied())
        self._updates += applied
        return self._result(sums.tolist(), num_tokens, num_patches, applied)

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Report over the batches with dropout off and fp32 products; see ``AutoencoderReport``.

        The noise is keyed by sample ids in a namespace of its own, so every evaluation of the same samples
        draws the same noise, and none disturbs training.
        """
        model = self._whole_model()
        sums = ReportSums(model, self._stage.objective, self._stage.evaluation_noise, self._device)
        for batch in batches:
            patches, valid = self._patches(batch.tokens)
            if batch.counted is not None:
                valid = valid & sent(batch.counted, valid.device)[..., None, None]
            for micro in range(patches.shape[0]):
                noise = self._noise(0, batch.sample_ids[micro], patches.shape[2], evaluation=True)
                sums.add(patches[micro], valid[micro], noise)
        dist.all_reduce(sums.vector)
        self.last_report = sums.report()
        return self.last_report.scalars()

    def save(self, directory: Path) -> list[str]:
        """Every rank writes its share of the fp32 weights and Adam moments (safetensors); returns the file's name."""
        return self._state.write(directory, self._state.snapshot(), self._updates)

    def save_async(self, directory: Path) -> Future[list[str]]:
        """As ``save``, but only the copy to host memory happens now; writing goes on in a thread."""
        return self._writer.submit(self._state.write, directory, self._state.snapshot(), self._updates)

    def load(self, directory: Path) -> None:
        """Load what any ZeRO stage on any number of ranks saved.

        Raises:
            EngineStateError: no state there, or it is damaged or another model's.
        """
        self._updates = self._state.read(directory)

    def is_finite(self) -> bool:
        """Every fp32 weight on every rank is finite; the same answer on every rank."""
        ok = all(bool(torch.isfinite(partition).all()) for partition in self._state.partitions)
        return all_agree(ok, self._device)

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole fp32 weights by published name, for an export; every rank calls, every rank gets them."""
        return {name: self._state.weight(name).detach() for name, _ in self._model.unique_parameters()}

    def _patches(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` [A, b, S] → patches int64 [A, b, P, K] on the device, and which of their tokens count."""
        length = tokens.shape[-1]
        if length % self._patch_size:
            raise CalmScaleError(
                f"a sequence of {length} tokens is not a whole number of patches of {self._patch_size}"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise CalmScaleError(
                f"token id {low if low < 0 else high} lies outside of the vocabulary of {self._vocab_size}; "
                "were the shards prepared with another tokenizer?"
            )
        patches = sent(tokens.unflatten(-1, (-1, self._patch_size)), self._device)
        if self._pad_id is None:
            return patches, torch.ones_like(patches, dtype=torch.bool)
        return patches, patches != self._pad_id

    def _global_counts(self, valid: torch.Tensor) -> tuple[int, int]:
        """Valid tokens and patches of the global batch."""
        if self._pad_id is None:
            return valid.numel() * self.data_size, valid.numel() * self.data_size // self._patch_size
        counts = torch.stack([valid.sum(), valid.any(dim=-1).sum()])
        dist.all_reduce(counts)
        num_tokens, num_patches = (int(count) for count in counts.tolist())
        if num_tokens == 0:
            raise CalmScaleError("the global batch holds nothing but padding")
        return num_tokens, num_patches

    def _noise(
        self, step: int, sample_ids: torch.Tensor, num_patches: int, *, evaluation: bool = False
    ) -> PositionNoise:
        return PositionNoise(
            self._seed,
            step,
            sample_ids,
            range(num_patches),
            namespace="eval" if evaluation else "train",
            device=self._device,
        )

    def _result(self, sums: list[float], num_tokens: int, num_patches: int, applied: bool) -> StepResult:
        totals = dict(zip(SUMS, sums, strict=True))
        cross_entropy = totals["cross_entropy"] / num_tokens
        clipped_kl = totals["clipped_kl"] / num_patches
        return StepResult(
            loss=objective_value(self._stage.objective, self._patch_size, cross_entropy, clipped_kl),
            grad_norm=float(self._engine.get_global_grad_norm()),
            skipped=not applied,
            metrics={
                "cross_entropy": cross_entropy,
                "clipped_kl": clipped_kl,
                "token_accuracy": totals["correct_tokens"] / num_tokens,
                "std": totals["std"] / num_patches,
            },
        )

    def _whole_model(self) -> Autoencoder:
        """The model to evaluate: itself, or under ZeRO-3 a whole copy of its partitioned weights."""
        if self._stage.zero.stage != 3:
            return self._model
        whole = Autoencoder(self._stage.model, self._vocab_size, self._patch_size).to(self._device)
        with torch.no_grad():
            for name, parameter in whole.unique_parameters():
                parameter.copy_(self._state.weight(name))
        return whole


def _check_layout(stage: AutoencoderStage, world: World) -> None:
    """Refuse ranks that the configuration does not describe, before anything is started."""
    if stage.zero.data not in (None, world.world_size):
        raise ConfigError(
            f"autoencoder.zero.data is {stage.zero.data}, but {world.world_size} ranks run; "
            f"start {stage.zero.data} or set autoencoder.zero.data={world.world_size}"
        )
    try:
        stage.training.accumulation(world.world_size)
    except ValueError as error:
        raise ConfigError(f"autoencoder.training: {error}") from None


def _import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this world's device, quiet, with a process group it can reuse.

    DeepSpeed decides on its accelerator while it is imported and insists on ``LOCAL_RANK``. Its shared-memory
    all-reduce on CPUs is switched off: it would be compiled at start-up, and a CPU run must not need a compiler. The
    table of its other operations, which is filled by trying each with a compiler, is then never asked for.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(world.backend, store=store, rank=0, world_size=1)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if world.device.type == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_comm_ready() -> bool:
    from deepspeed import comm

    return bool(comm.is_initialized())
