"""`deterministic: true`: kernels that add in a fixed order, so that the same step gives the same bits on a GPU too."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Read by cuBLAS, Transformer Engine and NCCL when they start. NVLS leaves the order of a sum to the switch."""


def set_deterministic(wanted: bool) -> None:
    """Make this process's kernels deterministic, if ``wanted``. Call before anything touches a device.

    An operation without a deterministic kernel then raises RuntimeError and names itself. Attention takes
    FlashAttention or the memory-efficient kernel, whose backward passes have a fixed order; cuDNN's has none.
    Megatron's ``deterministic_mode`` follows (``runtime.megatron``).
    """
    if not wanted:
        return
    os.environ.update(ENVIRONMENT)
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
