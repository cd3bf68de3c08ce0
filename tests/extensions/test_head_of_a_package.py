"""A head of a user's package, named in the document, is validated and counted like a built-in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DOCUMENT = """\
vocab_size: 64
patch_size: 2
autoencoder:
  training: {steps: 1, global_batch: 2}
lm:
  backbone: {num_layers: 2, hidden_size: 16, ffn_size: 24, num_heads: 2, positions: 8}
  training: {steps: 1, global_batch: 2}
  head:
    kind: some_package:MmdHead
    num_samples: 3
"""
COUNT = """
import sys
from calm_scale.config import load
from calm_scale.config.fields import policy_of
from calm_scale.accounting.activations import output_side
config = load(sys.argv[1])
assert type(config.lm.head).__name__ == "MmdHead" and "torch" not in sys.modules
assert policy_of("lm.head.num_samples", config.model_dump()).resume == "results"
assert output_side(config, "fused", 16).kept > output_side(
    config.model_copy(update={"lm": config.lm.model_copy(update={"head": type(config.lm.head)(num_samples=2)})}),
    "fused", 16).kept
from calm_scale.stages.flop_twin import compare
found = {one.what: one for one in compare(config)}
for what in ("language model parameters", "language model, forward", "language model, forward and backward"):
    one = found[what]
    print(what, one.symbolic, one.counted)
    assert abs(one.symbolic - one.counted) <= 0.1 * one.counted, one
"""


def run(code: str, document: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "run.yaml"
    path.write_text(document, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=False
    )


def test_flops_parameters_bytes_and_policy_of_its_own(tmp_path: Path) -> None:
    done = run(COUNT, DOCUMENT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_setting_and_an_unknown_head_are_refused_with_their_place(tmp_path: Path) -> None:
    code = "import sys; from calm_scale.config import load; load(sys.argv[1])"
    wrong = run(code, DOCUMENT.replace("num_samples: 3", "num_sample: 3"), tmp_path)
    assert "run.yaml:10: `lm.head.num_sample`: unknown key; did you mean `num_samples`?" in wrong.stderr
    unknown = run(code, DOCUMENT.replace("MmdHead", "Absent"), tmp_path)
    assert "run.yaml:9: `lm.head.kind`" in unknown.stderr and "Absent" in unknown.stderr
