"""A device as it was measured: what ``benchmarks/gpu.py --json`` wrote replaces the shares that plans assume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calm_scale.accounting.hardware import Device
from calm_scale.accounting.kernels import COPY_SHARE
from calm_scale.config.errors import ConfigError


class Measured(BaseModel):
    """The figures of one device that a plan uses; other keys of the file are passed over.

    Attributes:
        device: what torch reports as its name.
        products_per_second: FLOP/s of large bf16 matrix products, run for seconds without a pause.
        attention_per_second: FLOP/s of causal attention, forward and backward.
        copy_bytes_per_second: bytes/s read and written by a copy inside its memory.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    device: str
    products_per_second: float = Field(gt=0)
    attention_per_second: float = Field(gt=0)
    copy_bytes_per_second: float = Field(gt=0)


def calibrated(chip: Device, path: Path) -> Device:
    """``chip`` with the rates measured in the file at ``path``.

    Raises:
        ConfigError: the file cannot be read, holds no measurement, or one of another device or above the peak.
    """
    measured = _read(path)
    if measured.device not in chip.names:
        raise ConfigError(
            f"{path} was measured on '{measured.device}', not on {chip.key} ({', '.join(chip.names)}); "
            "give its file, or --gpu of the device it was measured on"
        )
    rates = {
        "products": measured.products_per_second / chip.peak,
        "attention": measured.attention_per_second / chip.peak,
        "memory": measured.copy_bytes_per_second / chip.bandwidth,
    }
    for name, share in rates.items():
        if share > 1:
            raise ConfigError(
                f"{path}: {name} at {share:.0%} of the {chip.key}'s peak cannot be; measure again"
            )
    return replace(
        chip,
        products=rates["products"],
        attention=rates["attention"],
        fused_attention=rates["attention"],
        bandwidth=measured.copy_bytes_per_second / COPY_SHARE,
        calibration=f"measured on one {measured.device} ({path.name})",
    )


def _read(path: Path) -> Measured:
    try:
        return Measured.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: {where}: {first['msg']}; write the file with benchmarks/gpu.py --json FILE"
        ) from None
