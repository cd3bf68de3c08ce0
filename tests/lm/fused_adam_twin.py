"""AdamW that keeps its count of updates as the fused ones of Transformer Engine and Apex do: per parameter group."""

from __future__ import annotations

from typing import Any

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """The control flow of FusedAdam: the group's ``step`` appears with the first update."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        as_tensor: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._as_tensor = as_tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor([1], dtype=torch.int32) if self._as_tensor else 1
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        count = int(group["step"])
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["exp_avg"].lerp_(p.grad, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            scale = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(state["exp_avg"] / (1 - first**count), scale, value=-group["lr"])


class TensorStepAdam(GroupStepAdam):
    """The same with a tensor as the count, as under CUDA graphs."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, as_tensor=True, **settings)


class IntegerStepAdam(GroupStepAdam):
    """A count per parameter, in a Python integer, that appears with the first update."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                count = int(state.pop("step", 0)) + 1
                self._update({**group, "params": [p], "step": count})
                state["step"] = count
