"""Copies from host memory to a device that the calling thread does not wait for."""

from __future__ import annotations

import torch


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor, where ``device`` is a GPU in page-locked memory, from which the GPU copies by itself."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``. On a GPU the copy is queued like a kernel; its host memory is kept until it is done."""
    return pinned(tensor, device).to(device, non_blocking=True)
