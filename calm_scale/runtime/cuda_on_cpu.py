"""A thin stand-in for CUDA, installed only on a machine without a GPU, so that Megatron-core trains on CPU ranks.

Megatron-core names the device ``cuda`` in a few constructors, asks which device and stream are current, moves
tensors with ``.cuda()`` and recognises parameters by the string ``torch.cuda.FloatTensor``. The stand-in redirects
exactly these.
Plain function replacement is used instead of a ``TorchFunctionMode``: a mode would pass *every* torch call
through Python, which costs a small model a tenth of its step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "zeros_like",
    "empty_like",
)
_NO_OPS = ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_device")
_installed = False


def install() -> bool:
    """Install the stand-in once. Returns whether it is active; with a usable GPU it stays away."""
    global _installed  # noqa: PLW0603  process-wide by nature: it replaces functions of the torch module
    if _installed or torch.cuda.is_available():
        return _installed
    _import_megatron_uncompiled()
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _NO_OPS:
        setattr(torch.cuda, name, _no_op(name))
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.Tensor.to = _redirected(torch.Tensor.to)  # type: ignore[assignment]
    torch.Tensor.type = _cuda_names(torch.Tensor.type)  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment]
    _redirect_rng_state()
    _installed = True
    return True


def _import_megatron_uncompiled() -> None:
    """Megatron decorates its fusions with ``torch.compile`` at import; on a CPU that only costs start-up time."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        import megatron.core.tensor_parallel  # noqa: F401
    finally:
        torch.compile = compile_


def _no_op(name: str) -> Callable[..., None]:
    """A CUDA call without a counterpart on the CPU. One function object each: torch tells its functions apart."""

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    nothing.__name__ = name
    return nothing


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with every CUDA device argument replaced by the CPU and memory pinning dropped."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        if len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return function(*args, **kwargs)

    return on_cpu


def _cuda_names(method: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type`` that answers ``torch.cuda.FloatTensor`` where the CPU would say ``torch.FloatTensor``."""

    @functools.wraps(method)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = method(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named


def _redirect_rng_state() -> None:
    """Megatron reads and writes the CUDA generator's state through two functions of its own."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
