"""The training state of a ZeRO-partitioned model as whole tensors, whatever the stage and the number of ranks.

State is read and written through DeepSpeed's own access functions, one parameter at a time, so the largest
temporary is one fp32 tensor of the largest parameter. On disk it is safetensors: DeepSpeed's own checkpoint
format is pickle (its loader runs code it finds there) and is tied to the number of ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from calm_scale.autoencoder.export import save_weights
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.files import checked, read_object
from calm_scale.config.section import Section
from calm_scale.training.engine import no_steps, set_step_count

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class EngineStateError(CalmScaleError):
    """A saved training state that is missing, incomplete, damaged, or of another model."""


class StateIndex(Section):
    """What a saved state holds: ``files`` maps a file to the parameters in it, ``shapes`` a parameter to its shape.

    ``optimizer_steps`` counts applied updates (skipped ones are not among them). Stage and world size are
    for the reader's information: any other stage or number of ranks may load the state.
    """

    format_version: int = FORMAT_VERSION
    optimizer_steps: int
    zero_stage: int
    world_size: int
    files: dict[str, tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]


class ZeroState:
    """Whole-tensor access to the fp32 weights and Adam moments of a DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned. Its optimizer must not have stepped yet.
        parameters: the parameters by name, tied ones once.
        shapes: their whole shapes, taken before DeepSpeed partitioned them.
        integer_step: the optimizer counts its steps in a Python integer (DeepSpeed's CPU Adam), not a tensor.
    """

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        integer_step: bool = False,
    ) -> None:
        self._engine = engine
        self._parameters = dict(parameters)
        self._shapes = dict(shapes)
        self._stage: int = engine.zero_optimization_stage()
        self.partitions = self._fp32_partitions()
        for partition in self.partitions:
            moments = {kind: torch.zeros_like(partition) for kind in KINDS[1:]}
            steps = 0 if integer_step else no_steps(engine.basic_optimizer, partition)
            engine.basic_optimizer.state[partition] = {"step": steps, **moments}
        if self._stage in (
            1,
            2,
        ):  # every parameter finds its slice of the moments; DeepSpeed does so at its first step
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    def weight(self, name: str) -> torch.Tensor:
        """The whole fp32 weight; every rank calls, every rank gets it."""
        return self._get(self._parameters[name], "weight")

    def snapshot(self) -> dict[str, torch.Tensor]:
        """This rank's share of the state as host copies, ``"<parameter>/<kind>"``; every rank calls."""
        mine = self._owners()[dist.get_rank()]
        out: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            for kind in KINDS:
                whole = self._get(parameter, kind)
                if name in mine:
                    out[f"{name}/{kind}"] = whole.detach().to("cpu", copy=True).contiguous()
        return out

    def write(self, directory: Path, share: Mapping[str, torch.Tensor], optimizer_steps: int) -> list[str]:
        """Write this rank's ``share``, and the index from rank 0; returns the files' names. No communication."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        files = {
            f"state_{r:05d}_of_{world_size:05d}.safetensors": names
            for r, names in enumerate(self._owners())
            if names
        }
        own = [file for file, names in files.items() if f"{names[0]}/weight" in share]
        for file in own:
            save_weights(dict(share), directory / file)
        if rank == 0:
            index = StateIndex(
                optimizer_steps=optimizer_steps,
                zero_stage=self._stage,
                world_size=world_size,
                files=files,
                shapes=self._shapes,
            )
            (directory / INDEX_FILE).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
            own.append(INDEX_FILE)
        return own

    def read(self, directory: Path) -> int:
        """Load the state that any ZeRO stage on any number of ranks wrote; returns its applied updates.

        Raises:
            EngineStateError: nothing to load, a file missing or damaged, or another model's state. Nothing has
                been changed then.
        """
        index = read_index(directory)
        self._check_shapes(index, directory)
        with ExitStack() as stack:
            readers = _open_all(index, directory, stack)
            for name, parameter in self._parameters.items():
                for kind in KINDS:
                    self._set(parameter, kind, readers[name].get_tensor(f"{name}/{kind}"))
        set_step_count(self._engine.basic_optimizer, index.optimizer_steps)
        return index.optimizer_steps

    def _check_shapes(self, index: StateIndex, directory: Path) -> None:
        problems = [f"{name} is missing" for name in self._shapes.keys() - index.shapes.keys()]
        problems += [f"{name} is unknown" for name in index.shapes.keys() - self._shapes.keys()]
        problems += [
            f"{name} is {list(index.shapes[name])} there, {list(shape)} here"
            for name, shape in self._shapes.items()
            if index.shapes.get(name, shape) != shape
        ]
        if problems:
            raise EngineStateError(f"{directory} holds another model's state: " + "; ".join(sorted(problems)))

    def _owners(self) -> list[tuple[str, ...]]:
        """Parameters whose state each rank writes: the largest first, each to the rank with the least so far."""
        loads = [0] * dist.get_world_size()
        owned: list[list[str]] = [[] for _ in loads]
        sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes.items()}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            rank = loads.index(min(loads))
            loads[rank] += sizes[name]
            owned[rank].append(name)
        return [tuple(names) for names in owned]

    def _fp32_partitions(self) -> list[torch.Tensor]:
        if self._stage == 0:
            return list(self._parameters.values())
        optimizer = self._engine.optimizer
        if self._stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _get(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole: torch.Tensor
        if self._stage == 0:
            whole = (
                parameter.data if kind == "weight" else self._engine.basic_optimizer.state[parameter][kind]
            )
        elif kind == "weight":
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = safe_get_full_optimizer_state(parameter, kind)
        return whole

    def _set(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """Set the fp32 state, and for a weight also the copy the model computes with."""
        if self._stage == 0:
            self._get(parameter, kind).copy_(value)
        elif self._stage == 3:
            self._set_partitioned(parameter, kind, value)
        else:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

            if kind == "weight":
                safe_set_full_fp32_param(parameter, value)
                parameter.data.copy_(value)
            else:
                safe_set_full_optimizer_state(parameter, value, kind)

    def _set_partitioned(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """ZeRO-3: partitions are padded to equal size, so this rank's slice is cut from a padded copy."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = value.new_zeros(size * dist.get_world_size())
        padded[: value.numel()] = value.flatten()
        mine = padded.narrow(0, size * dist.get_rank(), size)
        if kind != "weight":
            safe_set_local_optimizer_state(parameter, mine, kind)
            return
        safe_set_local_fp32_param(parameter, mine)
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)


def read_index(directory: Path) -> StateIndex:
    """The index of a saved state.

    Raises:
        EngineStateError: there is none, or it cannot be read.
    """
    path = directory / INDEX_FILE
    if not path.exists():
        raise EngineStateError(f"{directory} holds no saved training state ({INDEX_FILE} is missing)")
    raw = read_object(path, raises=EngineStateError)
    if (version := raw.get("format_version")) != FORMAT_VERSION:
        raise EngineStateError(f"{path} has format version {version}, this release reads {FORMAT_VERSION}")
    return checked(StateIndex, raw, path, raises=EngineStateError)


def stored_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The whole fp32 weights of a saved state by published name, without ranks and without DeepSpeed.

    Raises:
        EngineStateError: no state there, or it is damaged.
    """
    index = read_index(directory)
    with ExitStack() as stack:
        readers = _open_all(index, directory, stack)
        return {name: reader.get_tensor(f"{name}/weight") for name, reader in readers.items()}


def _open_all(index: StateIndex, directory: Path, stack: ExitStack) -> dict[str, Any]:
    """A reader for every parameter; all tensors are looked up before any is used."""
    readers: dict[str, Any] = {}
    for file, names in index.files.items():
        try:
            reader = stack.enter_context(safe_open(directory / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise EngineStateError(f"{directory / file} cannot be read: {error}") from error
        missing = set(_tensor_names(names)) - set(reader.keys())
        if missing:
            raise EngineStateError(f"{directory / file} lacks {', '.join(sorted(missing))}")
        readers.update(dict.fromkeys(names, reader))
    lost = index.shapes.keys() - readers.keys()
    if lost:
        raise EngineStateError(f"{directory / INDEX_FILE} names no file for {', '.join(sorted(lost))}")
    return readers


def _tensor_names(names: tuple[str, ...]) -> Iterator[str]:
    return (f"{name}/{kind}" for name in names for kind in KINDS)
