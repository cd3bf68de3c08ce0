"""The evaluation report, and the configurations of Table 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calm_scale.autoencoder.metrics import ReportSums, draw_report
from calm_scale.autoencoder.model import Autoencoder
from calm_scale.autoencoder.objective import gaussian_kl
from calm_scale.config import load
from calm_scale.config.autoencoder import AutoencoderModelConfig, AutoencoderStage, ObjectiveConfig
from calm_scale.runtime.noise import PositionNoise

REPO = Path(__file__).resolve().parents[2]
V, K, L = 11, 2, 6
CONFIG = ObjectiveConfig(kl_weight=0.1, kl_floor=0.3)
LEVELS = (0.2, 5.0)


@pytest.fixture
def model() -> Autoencoder:
    sizes = AutoencoderModelConfig(hidden_size=16, ffn_size=24, latent_size=L, init_std=0.4)
    return Autoencoder(sizes, V, K, seed=1)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, V, (4, 5, K), generator=torch.Generator().manual_seed(2))
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, 4], valid[2, 3, 1] = False, False
    return ids, valid


def sums_of(model: Autoencoder, rows: slice = slice(None)) -> ReportSums:
    ids, valid = batch()
    samples = range(4)[rows]
    sums = ReportSums(model, CONFIG, LEVELS, torch.device("cpu"))
    noise = PositionNoise(5, 0, samples, range(5), namespace="eval")
    sums.add(ids[rows], valid[rows], noise)
    return sums


def test_report_equals_a_count_by_hand(model: Autoencoder) -> None:
    report = sums_of(model).report()
    ids, valid = batch()
    noise = PositionNoise(5, 0, range(4), range(5), namespace="eval")
    with torch.no_grad():
        mean, log_std = model.encode(ids)
        z = mean + log_std.exp() * noise.normal("posterior", L)
        right = model.decode_ids(z) == ids
        extra = model.decode_ids(z + 0.2 * noise.normal("extra", L)) == ids
        from_mean = model.decode_ids(mean) == ids
    whole = [
        bool((right[b, p] | ~valid[b, p]).all()) for b in range(4) for p in range(5) if valid[b, p].any()
    ]
    counted = valid.any(-1)
    assert (report.num_tokens, report.num_patches) == (37, 19)
    assert report.token_accuracy == pytest.approx(float(right[valid].float().mean()))
    assert report.token_accuracy_mean == pytest.approx(float(from_mean[valid].float().mean()))
    assert report.patch_accuracy == pytest.approx(sum(whole) / 19)
    assert report.noise_levels == (0.0, 0.2, 5.0)
    assert report.noise_accuracy[0] == report.token_accuracy
    assert report.noise_accuracy[1] == pytest.approx(float(extra[valid].float().mean()))
    assert report.std_per_dim == pytest.approx(log_std.exp()[counted].mean(0).tolist(), rel=1e-5)
    kl = gaussian_kl(mean, log_std)[counted]
    assert report.kl == pytest.approx(float(kl.sum(-1).mean()), rel=1e-5)
    floored = float(kl.clamp(min=CONFIG.kl_floor).sum(-1).mean())
    assert report.loss == pytest.approx(K * report.cross_entropy + CONFIG.kl_weight * floored, rel=1e-5)


def test_halves_add_up_to_the_whole(model: Autoencoder) -> None:
    first, second = sums_of(model, slice(0, 1)), sums_of(model, slice(1, 4))
    first.vector += second.vector
    assert first.report().scalars() == pytest.approx(sums_of(model).report().scalars(), rel=1e-6)


def test_collapsed_dimensions_are_counted(model: Autoencoder) -> None:
    head = model.encoder.hidden_to_latent
    with torch.no_grad():
        for row in (1, 4, L + 1, L + 4):
            head.weight[row], head.bias[row] = 0.0, 0.0
    report = sums_of(model).report()
    assert report.collapsed_dims == 2
    assert [report.std_per_dim[j] for j in (1, 4)] == [1.0, 1.0]


def test_no_valid_token_is_an_error(model: Autoencoder) -> None:
    with pytest.raises(ValueError, match="no valid token"):
        ReportSums(model, CONFIG, LEVELS, torch.device("cpu")).report()


def test_the_picture_is_drawn(model: Autoencoder, tmp_path: Path) -> None:
    draw_report(sums_of(model).report(), tmp_path / "pictures" / "autoencoder.png")
    assert (tmp_path / "pictures" / "autoencoder.png").read_bytes().startswith(b"\x89PNG")


TABLE_2 = {
    "reconstruction": ("deterministic", 0.0, 0.0, 0.0, 0.0),
    "kl": ("gaussian", 1e-3, 0.0, 0.0, 0.0),
    "kl-clip": ("gaussian", 1e-3, 0.5, 0.0, 0.0),
    "token-dropout": ("gaussian", 1e-3, 0.5, 0.15, 0.0),
    "latent-dropout": ("gaussian", 1e-3, 0.5, 0.0, 0.15),
    "both": ("gaussian", 1e-3, 0.5, 0.15, 0.15),
}


@pytest.mark.parametrize("row", TABLE_2)
def test_every_row_of_table_2_is_a_config(row: str) -> None:
    stage = load(REPO / f"configs/autoencoder/table2/{row}.yaml").autoencoder
    assert isinstance(stage, AutoencoderStage)
    o = stage.objective
    assert (o.posterior, o.kl_weight, o.kl_floor, o.token_dropout, o.latent_dropout) == TABLE_2[row]
    assert stage.model.latent(4) == 128


def test_the_last_row_is_the_paper_s_autoencoder() -> None:
    both = load(REPO / "configs/autoencoder/table2/both.yaml").autoencoder
    assert both == load(REPO / "configs/autoencoder/k4.yaml").autoencoder
