"""The Megatron model behind the protocol: cached generation, batch-free scores, the baseline's two scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("softmax1", "energy2", "energy4", "atoms2")


@pytest.fixture(scope="module")
def report():
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_model_program.py"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_cache_and_ragged_batch_change_nothing(report, name):
    """Texts equal those of whole forward passes over the tokens so far."""
    assert report[name]["texts"] == report[name]["uncached_texts"]
    assert any(report[name]["texts"])


@pytest.mark.parametrize("name", NAMES)
def test_texts_do_not_depend_on_batch_size(report, name):
    assert report[name]["batches"] == [report[name]["texts"]] * 3


@pytest.mark.parametrize("name", ["energy2", "energy4"])
def test_one_draw_texts_do_not_depend_on_batch_size(report, name):
    nearer = report[name]["nearer"]
    assert all(batched == whole for batched, whole in nearer.values())
    assert nearer["noise_scale"][0] != report[name]["texts"] != nearer["shrink"][0]


@pytest.mark.parametrize("name", NAMES)
def test_scores_do_not_depend_on_batch_size(report, name):
    assert report[name]["identical"]


@pytest.mark.parametrize("name", NAMES)
def test_temperature_below_one_collides_more(report, name):
    assert report[name]["sharper_collision"][0] > report[name]["collision"][0]
    assert ("stated law" if name == "atoms2" else "N = 50") in report[name]["sampler"]


def test_time_is_split_into_head_and_decoder(report):
    assert {"backbone", "head", "decoder", "sampling"} <= set(report["energy4"]["parts"])
    assert "head + decoder" in report["softmax1"]["parts"]


def test_baseline_exact_scores_agree_with_sampled_ones(report):
    ours = report["softmax1"]
    assert ours["exact"] == pytest.approx(ours["sampled"], abs=0.05)
    assert ours["nats"] > 0


def test_text_scores(report):
    assert [report[n]["score_kind"] for n in NAMES] == ["cross-entropy", "energy", "energy", "energy"]
