"""A plan with a device as it was measured: slower where the device is slower, refused where the file is another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calm_scale.accounting import layout_search
from calm_scale.accounting.compared_models import paper_model
from calm_scale.accounting.hardware import calibrated, device
from calm_scale.accounting.report.plan_sections import plan_document
from calm_scale.accounting.report.render import to_markdown
from calm_scale.config import ConfigError

H100 = {
    "device": "NVIDIA H100 80GB HBM3",
    "products_per_second": 600e12,
    "attention_per_second": 400e12,
    "copy_bytes_per_second": 2.7e12,
}


def _file(folder: Path, **changed: object) -> Path:
    path = folder / "measured.json"
    path.write_text(json.dumps({**H100, **changed}))
    return path


def test_measured_rates_replace_the_fitted_shares(tmp_path: Path) -> None:
    chip = calibrated(device("h100"), _file(tmp_path))
    assert chip.products * chip.peak == pytest.approx(600e12)
    assert chip.fused_attention * chip.peak == pytest.approx(400e12)
    assert chip.link == device("h100").link
    text = to_markdown(plan_document(paper_model("CALM-XL"), 1, chip))
    assert "measured on one NVIDIA H100 80GB HBM3 (measured.json)" in text


def test_a_slower_device_makes_slower_plans(tmp_path: Path) -> None:
    halves = {name: H100[name] / 2 for name in H100 if name != "device"}  # type: ignore[operator]
    fast = layout_search.rank(paper_model("CALM-XL"), 1, calibrated(device("h100"), _file(tmp_path)))[0]
    slow = layout_search.rank(
        paper_model("CALM-XL"), 1, calibrated(device("h100"), _file(tmp_path, **halves))
    )[0]
    assert 1.8 < slow.time.total / fast.time.total < 2.05


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "NVIDIA A100-SXM4-80GB"}, "was measured on 'NVIDIA A100-SXM4-80GB', not on h100"),
        ({"products_per_second": 1200e12}, "products at 121% of the h100's peak"),
        ({"copy_bytes_per_second": 0.0}, "copy_bytes_per_second"),
        ({"attention_per_second": "fast"}, "attention_per_second"),
    ],
)
def test_a_file_that_cannot_be_this_device_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"measured\.json") as refused:
        calibrated(device("h100"), _file(tmp_path, **changed))
    assert message in str(refused.value)


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        calibrated(device("h100"), tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"write the file with benchmarks/gpu.py --json"):
        calibrated(device("h100"), tmp_path / "broken.json")
