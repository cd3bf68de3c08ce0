"""How many updates Adam has made, written where the optimizer at hand keeps it.

The count enters the bias correction, so an update after a resume is wrong without it. Three places are in use:

* torch's Adam and AdamW: a float tensor per parameter, on the parameter's device when fused or capturable
* DeepSpeed's CPU Adam: an integer per parameter
* FusedAdam of Transformer Engine, Apex and DeepSpeed: an integer or a tensor per parameter group, created by the
  first update
"""

from __future__ import annotations

from typing import Any

import torch


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Tell the optimizer that it has made ``count`` updates. The parameters' moments must exist.

    A count that is there keeps its type. An optimizer that is not torch's own and keeps none yet gets an integer per
    group.
    """
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = _like(state["step"], count)
    is_torch = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for group in optimizer.param_groups:
        if not is_torch or "step" in group:
            group["step"] = _like(group.get("step", 0), count)


def no_steps(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """The count of a parameter of which the optimizer keeps no state yet, in torch's form."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def _like(present: Any, count: int) -> Any:
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, count)
    return type(present)(count)
