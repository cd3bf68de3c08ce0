"""The whole model learns a source whose conditional law is known, and its noise carries that law."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report() -> dict:
    script = Path(__file__).with_name("learn_markov.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_reaches_nine_tenths_of_the_best_brier_for_every_n(report):
    assert report["autoencoder_accuracy"] == 1.0
    assert min(report["brier_shares"]) >= 0.9, report


def test_samples_from_one_hidden_state_have_the_right_frequencies(report):
    assert report["mean_total_variation"] < 0.12, report
    assert report["distinct_draws"] >= 3, report
