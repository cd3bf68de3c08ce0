"""Megatron's optimizer: ready the gradients, measure their global norm, update; and compare the replicas after it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from calm_scale.config import CalmScaleError
from calm_scale.config.training import OptimizerConfig
from calm_scale.lm.model import CalmModel
from calm_scale.lm.targets import sum_position_parallel_gradients
from calm_scale.runtime.megatron import DTYPES, Layout, Precision


def wrap_data_parallel(
    models: Sequence[CalmModel], *, distributed_optimizer: bool, overlap: bool
) -> list[Any]:
    """Megatron's DDP around each stage: contiguous fp32 gradient buffers, summed over the data-parallel group.

    With ``overlap`` a bucket of gradients is reduced while those of earlier layers are computed, and a bucket of
    weights that the distributed optimizer sharded is gathered while earlier layers run forward.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer,
    )
    chunks = [
        DistributedDataParallel(model.config, settings, model, disable_bucketing=not overlap or index > 0)
        for index, model in enumerate(models)
    ]
    if settings.overlap_param_gather:
        for model, chunk in zip(models, chunks, strict=True):
            model.decoder.register_forward_hook(partial(_finish_gathering, chunk))
    return chunks


def _finish_gathering(chunk: Any, *_: Any) -> None:
    """Waits for all weights of a stage: Megatron does so where a module is called, and a head may use the weights of a
    module that it does not call."""
    for group in chunk.bucket_groups:
        group.finish_param_sync()


@dataclass
class MegatronOptimizer:
    """AdamW over this rank's stages; fp32 master weights where the model is bf16.

    Attributes:
        inner: Megatron's optimizer (fp32, mixed-precision or distributed).
        gathers_late: an update leaves the gathering of the weights to the next forward pass.
    """

    inner: Any
    config: OptimizerConfig
    chunks: Sequence[Any]
    gathers_late: bool = False
    _stale: bool = False

    @classmethod
    def create(
        cls,
        chunks: Sequence[Any],
        config: OptimizerConfig,
        precision: Precision,
        *,
        distributed_optimizer: bool,
        overlap: bool,
    ) -> MegatronOptimizer:
        """Group the parameters (no decay on 1-D ones) and build Megatron's optimizer over the DDP buffers."""
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer

        settings = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            bf16=precision == "bf16",
            params_dtype=DTYPES[precision],
            use_distributed_optimizer=distributed_optimizer,
            clip_grad=config.clip_norm,
            overlap_param_gather=overlap and distributed_optimizer,
        )
        _measure_norms_on_the_device()
        inner = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False)
        if next(chunks[0].parameters()).is_cuda:
            use_fused_kernel(inner)
        return cls(inner, config, chunks, gathers_late=overlap and distributed_optimizer)

    def zero_grad(self) -> None:
        """Empty the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def global_norm(self) -> float:
        """Bring the reduced gradients to the optimizer; their 2-norm over all parameters, each counted once."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def update(self, lr: float, norm: float) -> None:
        """Clip by the global norm and take one AdamW step; sharded weights are gathered, now or in the next forward."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        if self.config.clip_norm > 0:
            for optimizer in self.inner.chained_optimizers:
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, self.config.clip_norm, norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        self.inner.step_with_ready_grads()
        self._stale = self.gathers_late

    def gather_weights(self) -> None:
        """Brings every rank's weights up to date before they are read other than by a forward pass. Collective."""
        if self._stale:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self._stale = False


def _measure_norms_on_the_device() -> None:
    """Replaces what Megatron does without Transformer Engine and Apex: a kernel and a copy to the host a tensor."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_on_device


def norm_on_device(
    chunk_size: int, noop_flag: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """2-norm [1] of all tensors together, in the signature of the kernel that the two packages bring."""
    return torch.nn.utils.get_total_norm(tensors[0]).view(1), None


def use_fused_kernel(inner: Any) -> None:
    """One kernel for a whole update, where Megatron took torch's AdamW; equal to its others to rounding.

    Call it before the first update. Transformer Engine's and Apex's optimizers are fused by themselves.
    """
    for optimizer in (chained.optimizer for chained in inner.chained_optimizers):
        if isinstance(optimizer, torch.optim.AdamW):
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["fused"] = True


def finalize_gradients(layout: Layout) -> Any:
    """The function Megatron's schedules call after the last micro-batch.

    Megatron sums over data-parallel replicas and, under sequence parallelism, over the marked norms; what it does
    not know are weights that saw only this rank's positions. The loss is already divided by the number of
    positions of the global batch, so nothing is rescaled here.
    """
    from megatron.core.distributed import finalize_model_grads

    def finalize(
        chunks: Sequence[Any], num_tokens: object = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        finalize_model_grads(list(chunks), None, pg_collection=pg_collection, **kwargs)
        parameters = (p for chunk in chunks for p in chunk.module.parameters())
        sum_position_parallel_gradients(parameters, layout.tensor_group)

    return finalize


class ReplicaMismatchError(CalmScaleError):
    """Copies of one weight have drifted apart."""

    may_pass = True


def check_replicas(models: Sequence[CalmModel], layout: Layout) -> None:
    """Compare every weight over its data-parallel replicas, and every unsplit one over tensor-parallel ranks.

    Raises:
        ReplicaMismatchError: on every rank of the group that disagrees, naming the first weights and the ranks.
    """
    digests = {
        f"{index}.{name}": (_digest(parameter), bool(getattr(parameter, "tensor_model_parallel", False)))
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    whole = {name: digest for name, (digest, _) in digests.items()}
    unsplit = {name: digest for name, (digest, split) in digests.items() if not split}
    _compare(whole, layout.data_group, "data-parallel")
    _compare(unsplit, layout.tensor_group, "tensor-parallel")


def _compare(mine: dict[str, str], group: dist.ProcessGroup, kind: str) -> None:
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    drifted = [name for name in mine if len({theirs[name] for theirs in everyone}) > 1]
    if drifted:
        ranks = dist.get_process_group_ranks(group)
        raise ReplicaMismatchError(
            f"{len(drifted)} weights differ between the {kind} ranks {ranks}, first {', '.join(drifted[:3])}: "
            "a gradient was not reduced over this group, or a rank computes wrongly"
        )


def _digest(parameter: torch.Tensor) -> str:
    raw = parameter.detach().contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
