"""Run one step of a tiny language model per configuration on this launcher's ranks; print what was really used.

Every rank prints one line per configuration: ``measured {json}`` with its stage, parameters, bytes that live
between steps, peak bytes within a step (storages that operations created), and the bytes of every collective.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import RunConfig, load
from calm_scale.runtime.world import World, init_world
from calm_scale.training.engine import Batch
from calm_scale.training.megatron.engine import MegatronEngine

OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_coalesced_": "all_reduce",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "send": "send",
}


class Collectives(TorchDispatchMode):
    """Bytes by (group, operation): the full tensor of every call. A group of None takes all that is left."""

    def __init__(self, groups: dict[str, dist.ProcessGroup | None]) -> None:
        super().__init__()
        self.groups = groups
        self.bytes: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        operation = OPERATIONS.get(name.split(".")[0]) if namespace == "c10d" else None
        if operation is not None:
            tensors = [a for a in _flatten(args) if isinstance(a, torch.Tensor)]
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            if group.size() == 1:
                return func(*args, **(kwargs or {}))
            names = (k for k, g in self.groups.items() if g is None or g.group_name == group.group_name)
            label = next(names, "other")
            label = "pipeline" if operation == "send" else label
            key = f"{label}/{operation}"
            self.bytes[key] += max(t.numel() * t.element_size() for t in tensors)
            self.calls[key] += 1
        return func(*args, **(kwargs or {}))


def _flatten(items: Any) -> list[Any]:
    if isinstance(items, list | tuple):
        return [leaf for item in items for leaf in _flatten(item)]
    return [items]


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations create and that are still alive, and their peak.

    A storage counts until its last owner (autograd's graph, a collective in flight) lets go of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in _flatten(args) if isinstance(t, torch.Tensor)}
        for tensor in _flatten(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        size = storage.nbytes()
        self.known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, size)

    def _leave(self, size: int) -> None:
        self.live -= size


def held_between_steps(codec: torch.nn.Module) -> int:
    """Bytes of every storage that is alive now, without the frozen autoencoder's."""
    frozen = {p.untyped_storage()._cdata for p in codec.parameters()}
    gc.collect()
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and not t.is_meta
    }
    return sum(size for key, size in storages.items() if key not in frozen)


def measure(config: RunConfig, world: World) -> dict[str, Any]:
    """Build, take two steps for the memory and a third for the collectives."""
    from megatron.core import parallel_state

    assert config.lm is not None and config.autoencoder is not None
    codec = Autoencoder(config.autoencoder.model, config.vocab_size, config.patch_size)
    codec.eval().requires_grad_(False)
    softmax = config.lm.predicts_tokens
    engine = MegatronEngine(config, world, None if softmax else codec)
    training = config.lm.training
    shape = (training.accumulation(engine.data_size), training.micro_batch)
    tokens = torch.randint(0, config.vocab_size, (*shape, config.lm.backbone.positions * config.patch_size))
    ids = torch.arange(tokens[..., 0].numel()).view(shape)
    engine.train_step(Batch(0, tokens, ids), 1e-3)
    static = held_between_steps(codec) - tokens.untyped_storage().nbytes()
    with LiveBytes() as memory:
        engine.train_step(Batch(1, tokens, ids), 1e-3)
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    with Collectives({k: g for k, g in groups.items() if g.size() > 1}) as seen:
        engine.train_step(Batch(2, tokens, ids), 1e-3)
    return {
        "name": config.name,
        "rank": world.rank,
        "stage": engine.layout.pipeline_rank,
        "parameters": sum(p.numel() for model in engine.models for p in model.parameters()),
        "static": static,
        "peak": memory.peak,
        "bytes": dict(seen.bytes),
        "calls": dict(seen.calls),
    }


def measure_autoencoder(config: RunConfig, world: World) -> dict[str, Any]:
    """The same for autoencoder training under ZeRO."""
    from calm_scale.training.deepspeed.engine import DeepSpeedEngine

    stage = config.autoencoder
    assert stage is not None
    nothing = torch.nn.Module()
    before = held_between_steps(nothing)  # DeepSpeed lets go of no engine
    engine = DeepSpeedEngine(
        stage, vocab_size=config.vocab_size, patch_size=config.patch_size, seed=0, world=world
    )
    shape = (stage.training.accumulation(world.world_size), stage.training.micro_batch)
    tokens = torch.randint(0, config.vocab_size, (*shape, stage.patches * config.patch_size))
    ids = torch.arange(tokens[..., 0].numel()).view(shape)
    engine.train_step(Batch(0, tokens, ids), 1e-3)
    static = held_between_steps(nothing) - before - tokens.untyped_storage().nbytes()
    with LiveBytes() as memory:
        engine.train_step(Batch(1, tokens, ids), 1e-3)
    with Collectives({"data": None}) as seen:
        engine.train_step(Batch(2, tokens, ids), 1e-3)
    return {
        "name": config.name,
        "rank": world.rank,
        "static": static,
        "peak": memory.peak,
        "bytes": dict(seen.bytes),
        "calls": dict(seen.calls),
    }


if __name__ == "__main__":
    here = init_world("cpu")
    for path in sys.argv[1:]:
        found = load(path)
        work = measure if found.lm is not None else measure_autoencoder
        sys.stdout.write(f"measured {json.dumps(work(found, here))}\n")  # one write: ranks share the pipe
        sys.stdout.flush()
        gc.collect()
    here.close()
