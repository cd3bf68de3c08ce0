"""Memory and communication models against what real gloo ranks allocate and send."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from calm_scale.accounting import communication, memory
from calm_scale.accounting.placement import stage_parameters
from calm_scale.config import RunConfig, to_yaml

MakeRun = Callable[..., RunConfig]
SCRIPT = Path(__file__).with_name("measure_layouts.py")
SHAPE = {"num_layers": 4, "hidden_size": 64, "ffn_size": 176, "num_heads": 4, "positions": 64}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sequence": {"tensor": 2, "sequence_parallel": True},
    "pp2_interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "dp2_replicated_optimizer": {"distributed_optimizer": False},
    "dp2_bf16": {},
    "tp2_recompute": {"tensor": 2, "recompute": "full"},
    "tp2_split_head": {"tensor": 2, "head_parallelism": "tensor", "sequence_parallel": True},
    "tp2_baseline": {"tensor": 2},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2pp2": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
}


def configuration(make: MakeRun, name: str, parallel: dict[str, Any]) -> RunConfig:
    head: dict[str, Any] = {"num_samples": 8, "num_posterior": 100}
    fields: dict[str, Any] = {"head": head}
    if name.endswith("baseline"):
        fields = {"head": {"kind": "softmax"}, "patch_size": 1}
    precision = "bf16" if name.endswith("bf16") else "fp32"
    training = {"global_batch": 4, "micro_batch": 1, "precision": precision}
    made = make(vocab_size=509, backbone=SHAPE, parallel=parallel, training=training, **fields)
    return made.model_copy(update={"name": name})


Records = dict[str, list[dict[str, Any]]]
"""What every rank measured, by the configuration's name."""


def measure(
    run_ranks: Callable[..., Any], configs: Sequence[RunConfig], num_ranks: int, folder: Path
) -> Records:
    paths = [folder / f"{config.name}.yaml" for config in configs]
    for config, path in zip(configs, paths, strict=True):
        path.write_text(to_yaml(config), encoding="utf-8")
    found: Records = defaultdict(list)
    for code, out, err in run_ranks(SCRIPT, *map(str, paths), num_ranks=num_ranks, timeout=280):
        assert code == 0, err[-3000:]
        for part in out.split("measured ")[1:]:
            record = json.JSONDecoder().raw_decode(part)[0]
            found[record["name"]].append(record)
    assert all(len(found[config.name]) == num_ranks for config in configs)
    return found


def check(config: RunConfig, records: list[dict[str, Any]], num_ranks: int) -> None:
    assert config.lm is not None
    data_parallel = config.lm.parallel.data_parallel(num_ranks)
    stages = memory.language_model(config, data_parallel, kernels="local")
    traffic = communication.language_model(config, data_parallel)
    for record in records:
        stage = record["stage"]
        assert stage_parameters(config)[stage].trained == record["parameters"]
        # The frozen autoencoder is outside of what the step allocates.
        expected = stages[stage].total - stages[stage].frozen
        assert expected == pytest.approx(record["static"] + record["peak"], rel=0.10), record
        sent: dict[str, float] = defaultdict(float)
        for item in traffic[stage]:
            sent[f"{item.group}/{item.operation}"] += item.bytes
        seen = {key: count for key, count in record["bytes"].items() if not key.startswith("other/")}
        assert set(sent) == set(seen), record
        for key, count in seen.items():
            # Gradient buffers are padded to the group: a few hundred bytes.
            assert sent[key] == pytest.approx(count, rel=1e-3, abs=512), (key, record)


def zero_configuration(level: int, precision: str, vocab_size: int) -> RunConfig:
    training = {"steps": 5, "global_batch": 8, "micro_batch": 2, "precision": precision}
    stage = {
        "patches": 128,
        "model": {"hidden_size": 64, "ffn_size": 160, "latent_size": 32},
        "training": training,
        "zero": {"stage": level},
    }
    return RunConfig.model_validate({"name": f"zero{level}", "vocab_size": vocab_size, "autoencoder": stage})


ZERO = [
    zero_configuration(*case)
    # 2003 · 64 weights are more than DeepSpeed keeps whole under ZeRO 3.
    for case in ((0, "bf16", 2003), (1, "fp32", 2003), (2, "fp32", 2003), (3, "fp32", 2003))
]


@pytest.fixture(scope="module")
def two_ranks(
    make_tiny: MakeRun, run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[RunConfig], Records]:
    """The language models and what was measured; DeepSpeed, which lets go of no engine, comes after them."""
    configs = [configuration(make_tiny, name, parallel) for name, parallel in LAYOUTS.items()]
    return configs, measure(run_ranks, [*configs, *ZERO], 2, tmp_path_factory.mktemp("two"))


@pytest.mark.ranks
def test_autoencoder_under_zero(two_ranks: tuple[list[RunConfig], Records]) -> None:
    for config in ZERO:
        expected = memory.autoencoder(config, 2, kernels="local").total
        traffic = communication.autoencoder(config, 2)
        for record in two_ranks[1][config.name]:
            assert expected == pytest.approx(record["static"] + record["peak"], rel=0.10), record
            for operation in ("all_reduce", "all_gather", "reduce_scatter"):
                sent = sum(item.bytes for item in traffic if item.operation == operation)
                # Losses and norms, a few numbers, are reduced beside the tensors.
                assert sent == pytest.approx(record["bytes"].get(f"data/{operation}", 0), abs=64), record


@pytest.mark.ranks
def test_two_ranks(two_ranks: tuple[list[RunConfig], Records]) -> None:
    configs, found = two_ranks
    for config in configs:
        check(config, found[config.name], 2)


@pytest.mark.ranks
def test_four_ranks(make_tiny: MakeRun, run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    configs = [configuration(make_tiny, name, parallel) for name, parallel in FOUR_RANKS.items()]
    found = measure(run_ranks, configs, 4, tmp_path)
    for config in configs:
        check(config, found[config.name], 4)
