"""Settings of torch for the whole process: the number of CPU threads, and deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launchers.process import cores_per_rank

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


def threads_per_rank(local_world_size: int, env: Mapping[str, str] | None = None) -> int:
    """Threads for one of ``local_world_size`` ranks on this node: its cores, or ``OMP_NUM_THREADS`` if fewer."""
    env = os.environ if env is None else env
    cores = cores_per_rank(local_world_size, env)
    asked = env.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) > 0 else cores
