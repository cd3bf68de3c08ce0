"""Reading and writing sharded checkpoints through Megatron's ``dist_checkpointing``, strictly.

A checkpoint is a set of global tensors by key, plus a small dictionary of plain values. Any layout reads what any
other wrote. Every key asked for must be there, and every stored key under the prefixes asked for must be asked for.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calm_scale.config import CalmScaleError
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import Piece, pieces_of

MODEL_PREFIX = "model."
_METADATA = ".metadata"
_TRUSTED_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
_TRUSTED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}


class CheckpointMismatchError(CalmScaleError):
    """What is stored and what the model needs are not the same tensors."""


def write_shards(
    shards: Sequence[Any],
    values: Mapping[str, Any],
    directory: Path,
    group: dist.ProcessGroup | None = None,
    make: Callable[[str], torch.Tensor] | None = None,
) -> list[str]:
    """Write this rank's ``ShardedTensor``s and (rank 0) the plain values. Every rank of ``group`` calls it.

    Returns the names of the files that this rank wrote.

    The files are those that ``dist_checkpointing`` reads: torch's sharded files, common.pt, metadata.json. Tensors
    are written from where they are, by this process (Megatron's own writer copies them and forks first).

    Args:
        make: the tensor of a key, asked for when it is its turn and let go afterwards; the shards' own data then
            only says shape and type. Each tensor gets a file of its own, because the writer keeps what went into
            a file until it is closed.

    Raises:
        Exception: on every rank, what one of them failed with, such as OSError for a full disk.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.serialization import get_crc32_options, set_crc32_options

    by_key: dict[str, list[Any]] = {}
    for shard in shards:
        if is_main_replica(shard.replica_id):
            by_key.setdefault(shard.key, []).append(shard)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    if make is not None:
        planner.lookup_object = lambda index: make(index.fqn)
    before = get_crc32_options()
    set_crc32_options(False)  # the commit's own checksums cover every byte
    try:
        save(
            mcore_to_pyt_state_dict(by_key, False),
            # Not fsynced here: this rank does that at the commit, while it reads them for their checksums.
            storage_writer=FileSystemWriter(directory, single_file_per_rank=make is None, sync_files=False),
            planner=planner,
            process_group=group,
        )
    except CheckpointException as error:  # a BaseException, around what went wrong
        raise next(iter(error.failures.values()))[0] from None
    finally:
        set_crc32_options(before)
    rank = dist.get_rank(group)
    own = sorted(path.name for path in directory.glob(f"__{rank}_*"))
    if rank != 0:
        return own
    torch.save({"values": dict(values)}, directory / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    return sorted({path.name for path in directory.iterdir() if not path.name.startswith("__")} | set(own))


def read_shards(shards: Sequence[Any], directory: Path, prefixes: Sequence[str] = ("",)) -> dict[str, Any]:
    """Fill the data of this rank's ``ShardedTensor``s in place; return the plain values. Every rank calls it.

    Args:
        prefixes: which stored keys must all be asked for by some rank ("" for every key).

    Raises:
        CheckpointMismatchError: a key is missing or unexpected, or a shape differs.
    """
    from megatron.core import dist_checkpointing

    _refuse_foreign_code(directory)
    stored = stored_shapes(directory)
    wanted = _gather_wanted(shards)
    _compare(wanted, {k: v for k, v in stored.items() if k.startswith(tuple(prefixes))}, directory)
    described: dict[str, Any] = {_unique(shard): shard for shard in shards}
    targets = {name: shard.data for name, shard in described.items()}
    loaded = dist_checkpointing.load(described, str(directory), validate_access_integrity=False)
    for name, target in targets.items():
        if loaded[name].data_ptr() != target.data_ptr():
            target.copy_(loaded[name])
    return dict(loaded["values"])


def read_weights(models: Sequence[CalmModel], directory: Path) -> dict[str, Any]:
    """Load only the model's weights, from a checkpoint of any layout; the optimizer's tensors are left alone."""
    shards = [model_shard(piece, is_main=True) for piece in pieces_of(models)]
    return read_shards(shards, directory, (MODEL_PREFIX,))


def model_shard(piece: Piece, *, is_main: bool) -> Any:
    """The weight itself, under its key."""
    return piece.shard(MODEL_PREFIX + piece.key, piece.parameter, is_main=is_main)


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in a checkpoint."""
    from megatron.core import dist_checkpointing

    _refuse_foreign_code(directory)
    found = dist_checkpointing.load_tensors_metadata(str(directory))
    return {key: tuple(tensor.global_shape) for key, tensor in found.items()}


def _unique(shard: Any) -> str:
    return f"{shard.key}@{','.join(map(str, shard.global_offset))}"


def _gather_wanted(shards: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    mine = {shard.key: tuple(shard.global_shape) for shard in shards}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: shape for part in everyone for key, shape in part.items()}


def _compare(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    missing = sorted(wanted.keys() - stored.keys())
    unexpected = sorted(stored.keys() - wanted.keys())
    reshaped = sorted(key for key in wanted.keys() & stored.keys() if wanted[key] != stored[key])
    lines = [f"  missing: {key}{_nearest(key, unexpected)}" for key in missing]
    lines += [f"  unexpected: {key}" for key in unexpected]
    lines += [f"  {key}: stored {list(stored[key])}, needed {list(wanted[key])}" for key in reshaped]
    if lines:
        shown = "\n".join(lines[:12]) + (f"\n  … and {len(lines) - 12} more" if len(lines) > 12 else "")
        raise CheckpointMismatchError(
            f"{directory} does not hold this model ({len(lines)} differences); nothing was loaded:\n{shown}"
        )


def _nearest(key: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.9)
    return f" (stored under {close[0]}?)" if close else ""


class _MetadataOnly(pickle.Unpickler):
    """Unpickles the storage index and refuses any name that is not part of it."""

    def find_class(self, module: str, name: str) -> Any:
        trusted = module.startswith(_TRUSTED_MODULES) or (module, name) in _TRUSTED_NAMES
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (trusted or dtype):
            raise CheckpointMismatchError(
                f"the checkpoint's index names {module}.{name}, which is no part of a checkpoint: it is damaged or "
                "was tampered with, and is not read"
            )
        return super().find_class(module, name)


def _refuse_foreign_code(directory: Path) -> None:
    """The storage index is a pickle that the library reads trustingly: look through it first."""
    path = directory / _METADATA
    if not path.is_file():
        raise CheckpointMismatchError(f"{directory} holds no sharded checkpoint (no {_METADATA} file)")
    with path.open("rb") as stream:
        _MetadataOnly(stream).load()


class Staging:
    """Host memory for the copies, kept from save to save: fresh memory costs several times the copy itself.

    From a GPU the copies run in pinned memory, on a stream of their own; ``finish`` waits for them.

    Attributes:
        copied_bytes: of all copies since it was made.
    """

    def __init__(self) -> None:
        self.copied_bytes = 0
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(self, shard: Any) -> Any:
        """The shard with its data in this staging; valid until the next copy of the same shard."""
        data = shard.data.detach()
        place = (shard.key, tuple(shard.global_offset))
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)
            self._buffers[place] = buffer
        self.copied_bytes += data.nbytes
        if data.is_cuda:
            self._copy_from_gpu(buffer, data)
        else:
            buffer.copy_(data)
        return replace(shard, data=buffer)

    def finish(self) -> None:
        """Returns when every copy is in its place."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy_from_gpu(self, buffer: torch.Tensor, data: torch.Tensor) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(data.device)
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(data, non_blocking=True)
        data.record_stream(self._stream)  # its memory is not given to others before the copy has read it
