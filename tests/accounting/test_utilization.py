"""A peak is known or there is no MFU; more than 100 % is an error, never a number."""

from __future__ import annotations

import math

import pytest

from calm_scale.accounting.goodput import UtilizationError, utilization
from calm_scale.accounting.hardware import DEVICES, UnknownDeviceError, by_name, device
from calm_scale.accounting.saves import expected_goodput, optimal_interval


def test_mfu_and_hfu_with_the_source_of_the_peak() -> None:
    found = utilization(
        model_flops=0.4 * 989.5e12 * 80,
        hardware_flops=0.5 * 989.5e12 * 80,
        seconds=10,
        world_size=8,
        device="NVIDIA H100 80GB HBM3",
        precision="bf16",
    )
    assert found.mfu == pytest.approx(0.4)
    assert found.hfu == pytest.approx(0.5)
    assert "datasheet" in str(found)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "bf16"),
        ("NVIDIA H900", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H100 80GB HBM3", "fp32"),
    ],
)
def test_unknown_peak_means_unavailable(name: str, precision: str) -> None:
    found = utilization(
        model_flops=1e30, hardware_flops=1e30, seconds=1, world_size=1, device=name, precision=precision
    )
    assert found.mfu is None
    assert str(found).startswith("MFU unavailable: ")


def test_more_than_the_peak_is_an_error() -> None:
    with pytest.raises(UtilizationError, match="102 %"):
        utilization(
            model_flops=1.0e15,
            hardware_flops=1.01e15,
            seconds=1,
            world_size=1,
            device="NVIDIA H200",
            precision="bf16",
        )


def test_device_table_is_unambiguous() -> None:
    assert device("H100").key == "h100"
    for key in ("h100", "a100", "h200", "b200", "mi300x"):
        assert device(key).source
    names = [name for found in DEVICES for name in found.names]
    assert len(names) == len(set(names))
    assert by_name("NVIDIA H200") is device("h200")
    with pytest.raises(UnknownDeviceError, match="mi300x"):
        device("v100")


@pytest.mark.parametrize(("save", "mtbf"), [(10.0, 3600.0), (60.0, 86400.0), (120.0, 7200.0)])
def test_daly_interval_maximises_expected_goodput(save: float, mtbf: float) -> None:
    best = optimal_interval(save, mtbf)
    at_best = expected_goodput(best, save, 300.0, mtbf)
    grid = [expected_goodput(best * f, save, 300.0, mtbf) for f in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert at_best > max(grid)
    numeric = max(expected_goodput(best * (0.5 + i / 1000), save, 300.0, mtbf) for i in range(1500))
    assert at_best == pytest.approx(numeric, rel=1e-4)


def test_interval_limits() -> None:
    assert optimal_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-2)
    assert optimal_interval(100.0, 10.0) == 10.0
    assert expected_goodput(1e9, 1, 1, 1) == 0
