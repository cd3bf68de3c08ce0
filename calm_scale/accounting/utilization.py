"""MFU and HFU: a share of a stated peak, or a stated reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from calm_scale.accounting.hardware import by_name
from calm_scale.config.errors import CalmScaleError


class UtilizationError(CalmScaleError):
    """A utilization above 100 %: time, work or device is wrong, so no number is reported."""


@dataclass(frozen=True)
class Utilization:
    """MFU (model FLOPs) and HFU (with recomputation) as shares of the peak.

    Both are None where there is no peak to relate to; ``basis`` then says why, else it is the peak's source.
    """

    mfu: float | None
    hfu: float | None
    basis: str

    def __str__(self) -> str:
        if self.mfu is None or self.hfu is None:
            return f"MFU unavailable: {self.basis}"
        return f"MFU {100 * self.mfu:.1f} %, HFU {100 * self.hfu:.1f} % of {self.basis}"


def utilization(
    *, model_flops: float, hardware_flops: float, seconds: float, world_size: int, device: str, precision: str
) -> Utilization:
    """Utilization of ``world_size`` devices that did this work in ``seconds`` of training.

    Raises:
        UtilizationError: the result is above 100 %.
    """
    known = by_name(device)
    if known is None:
        return Utilization(None, None, f"no peak is on record for the device '{device}'")
    if precision != "bf16":
        return Utilization(None, None, f"the run is {precision}; the peak on record for {device} is bf16")
    if seconds <= 0:
        return Utilization(None, None, "no training time is on record")
    available = known.peak * world_size * seconds
    mfu, hfu = model_flops / available, hardware_flops / available
    if max(mfu, hfu) > 1:
        raise UtilizationError(
            f"utilization of {100 * max(mfu, hfu):.0f} % on {world_size} × {device}: more work than the peak allows in "
            f"{seconds:.3g} s. Check the ledger's seconds, its world size and the device name"
        )
    return Utilization(mfu, hfu, f"{known.peak / 1e12:g} TFLOP/s ({known.source})")
