"""Weight files of a published folder, one tensor at a time: safetensors or .bin, whole or sharded with an index.

Nothing that is read runs code: ``.bin`` files go through ``torch.load(weights_only=True)``. Files are mapped, and the
mapping is dropped after a while, so a model of any size costs the memory of the tensor at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from calm_scale.autoencoder.export import save_weights
from calm_scale.config.errors import ConfigError
from calm_scale.config.files import read_object

if TYPE_CHECKING:
    from torch import Tensor

Container = Literal["safetensors", "bin"]
Shape: TypeAlias = "tuple[int, ...]"
_BYTES_OF_A_MAPPING = 1 << 29
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STEMS: dict[Container, str] = {"safetensors": "model", "bin": "pytorch_model"}


class InteropError(ConfigError):
    """A published folder that is incomplete, damaged, or not of the layout; or a model that has none."""


class WeightFiles:
    """The tensors of a folder by name; opened on first use.

    Raises:
        InteropError: no weights, a missing or damaged file, or an index that points outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _locate(folder)
        self._mapped: tuple[Path, Any] | None = None
        self._given_out = 0

    @property
    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._file_of)

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            InteropError: it cannot be read, or is no weight (``check_weight``).
        """
        found = self._read(name)
        check_weight(self._file_of[name], name, found)
        self._given_out += _num_bytes([found])
        return found

    def outline(self, name: str) -> Tensor:
        """Shape and type of one tensor, on the meta device; its bytes are not read."""
        return self._read(name).to("meta")

    def _read(self, name: str) -> Tensor:
        path = self._file_of[name]
        handle = self._handle(path)
        try:
            found = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except Exception as error:
            raise InteropError(
                f"{path}: the index lists {name}, but it cannot be read there: {error}"
            ) from error
        if not isinstance(found, torch.Tensor):
            raise InteropError(f"{path}: {name} is a {type(found).__name__}, not a tensor")
        if found.layout != torch.strided or found.is_meta:
            kind = "on the meta device" if found.is_meta else str(found.layout).removeprefix("torch.")
            raise InteropError(f"{path}: {name} is {kind}; a weight is a dense tensor with its numbers")
        _check_dtype(path, name, found)
        return found

    def _handle(self, path: Path) -> Any:
        """The mapped file. Pages that were read stay resident as long as a mapping lives, so none lives long."""
        if self._mapped is None or self._mapped[0] != path or self._given_out > _BYTES_OF_A_MAPPING:
            self._mapped = None
            self._mapped, self._given_out = (path, _open(path)), 0
        return self._mapped[1]


def check_shape(files: WeightFiles, name: str, *wanted: Shape) -> None:
    """Raises InteropError unless the stored tensor has one of the shapes that its config.json allows."""
    found = tuple(files.outline(name).shape)
    if found not in wanted:
        made = " or ".join(str(list(shape)) for shape in wanted)
        raise InteropError(f"{files.folder}: {name} is {list(found)}, its config.json makes it {made}")


def check_depth(files: WeightFiles, num_layers: int) -> None:
    """Raises InteropError for more layers than tensors, before the names of all those layers are made."""
    if num_layers > len(files.names):
        raise InteropError(
            f"{files.folder}: its config.json has {num_layers:,} layers, its weights are {len(files.names):,} tensors"
        )


def check_weight(where: Path, name: str, tensor: Tensor) -> None:
    """Raises InteropError unless the tensor is of a floating type and finite; takes no memory of its size."""
    _check_dtype(where, name, tensor)
    if not tensor.numel() or all(bound.isfinite() for bound in tensor.aminmax()):  # a NaN becomes both bounds
        return
    count = tensor.numel() - int(tensor.isfinite().sum())
    raise InteropError(
        f"{where}: {name} is not finite in {count:,} of {tensor.numel():,} elements; these weights cannot be used"
    )


def _check_dtype(where: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        found = str(tensor.dtype).removeprefix("torch.")
        raise InteropError(f"{where}: {name} is {found}; a weight is one of {known}")


def write_weights(
    folder: Path, groups: Iterable[Sequence[tuple[str, Tensor]]], container: Container, max_shard_bytes: int
) -> None:
    """Writes tensors in the given order into one file, or into shards and an index.

    Args:
        groups: tensors that must share a file, such as a tensor and its aliases (``.bin`` keeps them shared;
            safetensors has no sharing and gets a copy each).
        max_shard_bytes: a new shard begins before this many bytes are passed.

    Raises:
        InteropError: a tensor is not of a floating type, or not finite.
        CalmScaleError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    names: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        parts.append(folder / f"{_STEMS[container]}.part{len(parts)}.tmp")
        names.append(list(pending))
        _save(pending, parts[-1], container)
        pending.clear()

    for group in groups:
        check_weight(folder, *group[0])  # the others of a group are its aliases
        size = _num_bytes(t for _, t in group)
        if pending and _num_bytes(pending.values()) + size > max_shard_bytes:
            flush()
        pending.update(group)
        total += size
    flush()
    finals = [folder / _shard_name(container, i, len(parts)) for i in range(len(parts))]
    for stale in (*folder.glob(f"{_STEMS[container]}*.{container}"), _index_path(folder, container)):
        stale.unlink(missing_ok=True)
    for part, final in zip(parts, finals, strict=True):
        part.replace(final)
    if len(parts) > 1:
        weight_map = {name: final.name for final, held in zip(finals, names, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _index_path(folder, container).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _locate(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InteropError(f"{folder} is not a folder")
    for container in _STEMS:
        index = _index_path(folder, container)
        single = folder / _shard_name(container, 0, 1)
        if index.is_file():
            return _read_index(index)
        if single.is_file():
            handle = _open(single)
            return dict.fromkeys(handle.keys(), single)
    raise InteropError(
        f"{folder} holds no weights: looked for model.safetensors, pytorch_model.bin and their .index.json"
    )


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_object(index, remedy="download it again", raises=InteropError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InteropError(f"{index} is not a weight index: it has no object `weight_map`")
    located = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    for path in set(located.values()):
        if path.parent.resolve() != index.parent.resolve():
            raise InteropError(f"{index} points outside of its folder: {path}")
        if not path.is_file():
            raise InteropError(f"{index} names {path.name}, which is missing: the download is incomplete")
    return located


def _open(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            return safe_open(path, framework="pt", device="cpu")
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise InteropError(f"{path} cannot be read as weights: {error}") from error
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise InteropError(f"{path} holds a {type(held).__name__}, not tensors by name: it is no state_dict")
    return held


def _save(tensors: dict[str, Tensor], path: Path, container: Container) -> None:
    if container == "bin":
        torch.save(tensors, path)
        return
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        unshared[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_weights(unshared, path, {"format": "pt"})


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _shard_name(container: Container, number: int, count: int) -> str:
    stem = _STEMS[container]
    return f"{stem}.{container}" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{container}"


def _index_path(folder: Path, container: Container) -> Path:
    return folder / f"{_STEMS[container]}.{container}.index.json"
