"""Accelerators: peak, memory and links, each with its source, and a device as it was measured.

A device that is not listed has no peak: no guessing. What ``benchmarks/gpu.py --json`` wrote replaces the shares that
plans assume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calm_scale.config.errors import ConfigError

GB = 10**9
TERA = 10**12

COPY_SHARE = 0.83
"""Memory bandwidth that kernels see over the datasheet figure (device copies: A100 1.61 of 2.04 TB/s, H100 2.90 of
3.35, H200 4.01 of 4.8)."""

# Shares of the peak inside a training step, fitted to published runs (docs/scale.md); devices without published
# runs take those of the H100. Calls: what nccl-tests tables show beyond bytes over bandwidth at 1-16 MiB.
A100_PRODUCTS, A100_ATTENTION, A100_CALL = 0.815, 0.45, 75e-6
H100_PRODUCTS, H100_ATTENTION, H100_FUSED_ATTENTION, H100_CALL = 0.69, 0.35, 0.45, 30e-6


class UnknownDeviceError(ConfigError):
    """A device key that is not in the table; names those that are."""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        key: the name on the command line.
        names: what torch reports as its device name. Anything else (a partition of the device, too) is unknown.
        peak: dense bf16 FLOP/s.
        memory: bytes.
        bandwidth: bytes/s of its memory.
        vector: fp32 FLOP/s outside of the matrix units.
        link: bytes/s per direction to the other devices of its node.
        network: bytes/s per direction and device between nodes, as such nodes are usually built.
        products: share of ``peak`` that large bf16 matrix products reach inside a training step.
        attention: share of ``peak`` that FlashAttention-2 reaches, forward and backward together.
        fused_attention: the same of the kernel made for the device (cuDNN, FlashAttention-3).
        call_seconds: what a collective inside a node costs beside its bytes.
        dollars_per_hour: an assumption for cost columns, to be replaced by the site's own price.
        source: where the peak is from.
        calibration: where the shares of the peak are from.
    """

    key: str
    names: tuple[str, ...]
    peak: float
    memory: float
    bandwidth: float
    vector: float
    link: float
    network: float
    products: float
    attention: float
    fused_attention: float
    call_seconds: float
    dollars_per_hour: float
    source: str
    calibration: str = "fitted to published runs (docs/scale.md)"


DEVICES: tuple[Device, ...] = (
    Device(
        "a100",
        ("NVIDIA A100-SXM4-80GB",),
        312 * TERA,
        80 * GB,
        2039 * GB,
        19.5 * TERA,
        300 * GB,
        25 * GB,
        A100_PRODUCTS,
        A100_ATTENTION,
        A100_ATTENTION,
        A100_CALL,
        1.8,
        "NVIDIA A100 datasheet, bf16 dense 312 TFLOPS (SXM 80 GB)",
    ),
    Device(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        312 * TERA,
        40 * GB,
        1555 * GB,
        19.5 * TERA,
        300 * GB,
        25 * GB,
        A100_PRODUCTS,
        A100_ATTENTION,
        A100_ATTENTION,
        A100_CALL,
        1.3,
        "NVIDIA A100 datasheet, bf16 dense 312 TFLOPS (40 GB)",
    ),
    Device(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        989.5 * TERA,
        80 * GB,
        3350 * GB,
        66.9 * TERA,
        450 * GB,
        50 * GB,
        H100_PRODUCTS,
        H100_ATTENTION,
        H100_FUSED_ATTENTION,
        H100_CALL,
        3.0,
        "NVIDIA H100 datasheet, SXM: bf16 1979 TFLOPS with sparsity, half of it dense",
    ),
    Device(
        "h100-pcie",
        ("NVIDIA H100 PCIe",),
        756.5 * TERA,
        80 * GB,
        2000 * GB,
        51.2 * TERA,
        64 * GB,
        25 * GB,
        H100_PRODUCTS,
        H100_ATTENTION,
        H100_FUSED_ATTENTION,
        H100_CALL,
        2.5,
        "NVIDIA H100 datasheet, PCIe: bf16 1513 TFLOPS with sparsity, half of it dense",
    ),
    Device(
        "h200",
        ("NVIDIA H200",),
        989.5 * TERA,
        141 * GB,
        4800 * GB,
        66.9 * TERA,
        450 * GB,
        50 * GB,
        H100_PRODUCTS,
        H100_ATTENTION,
        H100_FUSED_ATTENTION,
        H100_CALL,
        3.8,
        "NVIDIA H200 datasheet, SXM: bf16 1979 TFLOPS with sparsity, half of it dense",
    ),
    Device(
        "b200",
        ("NVIDIA B200",),
        2250 * TERA,
        180 * GB,
        7700 * GB,
        75.0 * TERA,
        900 * GB,
        50 * GB,
        H100_PRODUCTS,
        H100_ATTENTION,
        H100_FUSED_ATTENTION,
        H100_CALL,
        5.5,
        "NVIDIA DGX B200 datasheet: bf16 36 PFLOPS with sparsity for 8, half of it dense",
    ),
    Device(
        "mi300x",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        1307.4 * TERA,
        192 * GB,
        5300 * GB,
        163.4 * TERA,
        448 * GB,
        50 * GB,
        H100_PRODUCTS,
        H100_ATTENTION,
        H100_FUSED_ATTENTION,
        H100_CALL,
        2.5,
        "AMD Instinct MI300X data sheet, bf16 dense 1307.4 TFLOPS",
    ),
)


def device(key: str) -> Device:
    """The device of that key.

    Raises:
        UnknownDeviceError: no such key.
    """
    for found in DEVICES:
        if found.key == key.lower():
            return found
    raise UnknownDeviceError(f"gpu '{key}' is not in the table; it knows {', '.join(d.key for d in DEVICES)}")


def by_name(name: str) -> Device | None:
    """The device that torch calls ``name``, exactly; None where it is not listed."""
    return next((found for found in DEVICES if name in found.names), None)


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
