"""The symbolic count against torch's counter of the real modules, forward, backward and recomputed, to the FLOP.

Each twin runs in its own process: Megatron's groups and its CPU stand-in are global.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calm_scale.config import RunConfig, load, to_yaml
from calm_scale.stages.flop_twin import tiny_twin

MakeRun = Callable[..., RunConfig]

SCRIPT = """
import dataclasses, json, sys
from calm_scale.config import load
from calm_scale.stages.flop_twin import compare
for path in sys.argv[1:]:
    print("twin", json.dumps([dataclasses.asdict(c) for c in compare(load(path))]))
"""

CASES: dict[str, dict[str, Any]] = {
    "energy": {},
    "grouped_queries": {"backbone": {"num_query_groups": 2}},
    "both_inputs": {"input_mode": "both"},
    "latent_input": {"input_mode": "continuous", "patch_size": 2},
    "recompute_full": {"parallel": {"recompute": "full"}},
    "recompute_selective": {"parallel": {"recompute": "selective"}},
    "atoms": {"head": {"kind": "atoms", "num_atoms": 5, "num_posterior": 3}},
    "flow": {"head": {"kind": "flow", "num_repeats": 3}},
    "diffusion": {"head": {"kind": "diffusion", "num_repeats": 3}, "patch_size": 2},
    "baseline": {"head": {"kind": "softmax"}, "patch_size": 1},
}


@pytest.fixture(scope="module")
def counted(make_tiny: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("twins")
    paths = []
    for name, fields in CASES.items():
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(to_yaml(make_tiny(**fields)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, paths)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("twin ")]
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_product_of_the_twin_is_counted(counted: dict[str, Any], case: str) -> None:
    found = counted[case]
    exact = [c for c in found if not c["note"]]
    assert len(exact) == (3 if case == "baseline" else 6)
    for comparison in exact:
        assert comparison["symbolic"] == comparison["counted"] > 0, comparison


def test_what_the_counter_sees_differently_is_itemised(counted: dict[str, Any]) -> None:
    (loss,) = [c for c in counted["energy"] if c["what"].startswith("energy loss")]
    n, m, l = 3, 5, 12
    sample_target, incidence = 2 * n * m * l, 2 * (2 * n * n * (n - 1) // 2 * l)
    assert loss["counted"] == sample_target + incidence
    assert loss["note"]
    (table,) = [c for c in counted["energy"] if c["what"].startswith("frozen encoder")]
    k, a, f = 4, 16, 24
    assert table["symbolic"] == 2 * k * 3 * a * f
    assert table["counted"] == 0


def test_twin_keeps_the_architecture(tiny: MakeRun) -> None:
    config = tiny(backbone={"num_query_groups": 2}, parallel={"tensor": 2}, input_mode="both")
    twin = tiny_twin(config)
    assert twin.lm is not None and config.lm is not None
    assert twin.patch_size == config.patch_size
    assert twin.lm.input_mode == "both"
    assert twin.lm.backbone.num_heads // twin.lm.backbone.query_groups == 2
    assert twin.lm.parallel.tensor == 1


def test_twin_of_the_presets_builds() -> None:
    for path in sorted((Path(__file__).parents[2] / "configs" / "lm").glob("*.yaml")):
        assert tiny_twin(load(path)).name == "twin"
