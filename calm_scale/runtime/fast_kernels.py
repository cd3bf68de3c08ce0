"""Fast GPU kernels that other packages bring: which are there, and what a training does without them."""

from __future__ import annotations

import functools
import importlib.util
import socket
import sys
from dataclasses import dataclass

import torch

from launchers import environment

_TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True)
class FastKernels:
    """The packages that can be imported.

    Attributes:
        transformer_engine: layers with fused norms, attention and rotary embedding; AdamW; norms and scaling of many
            tensors.
        apex: AdamW; norms and scaling of many tensors.
        apex_weight_gradient: a product that adds a weight's gradient to its fp32 buffer.
        triton: the energy loss, and noise in one launch.
    """

    transformer_engine: bool = False
    apex: bool = False
    apex_weight_gradient: bool = False
    triton: bool = False

    @property
    def accumulate_in_layers(self) -> bool:
        """Whether the backbone's linear layers can add their weights' gradients to the fp32 buffers themselves."""
        return self.transformer_engine or self.apex_weight_gradient


NONE = FastKernels()


@functools.cache
def found() -> FastKernels:
    """What is there on this machine, whether or not it has a GPU."""
    return FastKernels(
        transformer_engine=has_transformer_engine(),
        apex=_is_there("apex.optimizers"),
        apex_weight_gradient=_is_there("fused_weight_gradient_mlp_cuda"),
        triton=_is_there("triton"),
    )


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):  # as foreign builds fail
        return False
    return True


def missing(kernels: FastKernels, slower: float | None = None) -> list[str]:
    """What a language model's training on GPUs does without, a line each.

    Args:
        slower: how many times as long a step takes without Transformer Engine, where it can be estimated.
    """
    lines = []
    if not kernels.transformer_engine:
        cost = "" if slower is None else f"; a step is estimated to take {slower:.2f} times as long"
        fused = (
            "" if kernels.apex_weight_gradient else ", a gradient is written once more before it is added up"
        )
        lines.append(
            "Transformer Engine is not there: norms, attention and the rotary embedding take more and slower "
            f"kernels{fused}{cost}"
        )
    if not (kernels.transformer_engine or kernels.apex):
        lines.append(
            "neither Transformer Engine nor Apex is there: clipping takes two kernels for each weight, and the update "
            "torch's fused AdamW"
        )
    if not kernels.triton:
        lines.append(
            "Triton is not there: the energy loss takes torch's kernels, several times slower and with more memory, "
            "and noise takes a launch for every 16 positions"
        )
    return lines


@functools.cache
def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be imported. Ask before Megatron is imported.

    A broken one (built for another torch, a library missing) is named once per node and hidden from Megatron, which
    would end with the same error.
    """
    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is None:
        return False
    try:
        importlib.import_module(f"{_TRANSFORMER_ENGINE}.pytorch")
    except (
        Exception
    ) as error:  # whatever a foreign build raises: ImportError, OSError, RuntimeError, AssertionError
        for name in [name for name in sys.modules if name.split(".")[0] == _TRANSFORMER_ENGINE]:
            del sys.modules[name]
        sys.modules[_TRANSFORMER_ENGINE] = None  # type: ignore[assignment]
        if environment.facts().local_rank == 0:
            sys.stderr.write(
                f"Transformer Engine is installed on {socket.gethostname()} but cannot be imported "
                f"({type(error).__name__}: {error}); its layers are replaced by slower ones. Install a build for torch "
                f"{torch.__version__}, or uninstall it\n"
            )
        return False
    return True
