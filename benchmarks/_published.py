"""Published training runs of dense Transformers, each as a run document that the plan can estimate."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from calm_scale.accounting import hardware
from calm_scale.accounting.hardware import Device
from calm_scale.accounting.kernels import EAGER, FUSED, Software
from calm_scale.accounting.step_time import StepTime, step_time
from calm_scale.config import RunConfig

DATA = Path(__file__).parent / "data" / "published_throughput.csv"

MIXED = Software("Aleph Alpha's trainer", norm_passes=46, activation_passes=4, logit_bytes=20, gaps=45)
"""Partly fused kernels; fitted (``plan_accuracy.py --fit``)."""
NANOTRON = {
    "bucket_bytes": 25e6,
    "tensors_a_call": True,
    "step_seconds": 0.09,
}
PROGRAMS: dict[str, Software] = {
    "D": replace(
        FUSED,
        name="NeMo with Transformer Engine",
        fused_attention=True,
        overlap_tensor=0.77,
        overlap_gather=True,
        overlap_pipeline=0.7,
        gradient_bytes=2,
    ),
    "H": MIXED,
    "N": replace(FUSED, name="nanotron, 2025", **NANOTRON),
    "NB": replace(EAGER, name="nanotron, 2024", **NANOTRON),
}
"""What each source states of its program: kernels, overlap, precision and buckets of the reduction."""

DEVICES = {"A100-80": "a100", "H100": "h100"}
TRAINING_FAMILIES = (
    "aa13B-32",
    "aa13B-8k",
    "aa65B",
    "nt-nt1.3B",
    "nt-nt8.9B",
    "nt-nt80B",
    "l3-8B-bf16-v25.02",
    "l3-70B-v25.02",
    "nm15B-v25.02",
    "nb1.1B-8",
)
"""Whole families that the constants were fitted to; every other one is held out."""


@dataclass(frozen=True)
class Row:
    """A published run: where it is from, what ran, and its measured step."""

    id: str
    source: str
    family: str
    device: Device
    gpus: int
    config: RunConfig
    data_parallel: int
    measured: float

    def predict(self, device: Device | None = None, software: Software | None = None) -> StepTime:
        """The plan's estimate for this run."""
        return step_time(
            self.config,
            self.data_parallel,
            device or self.device,
            8,
            software=software or PROGRAMS[self.source],
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a table that the plan can express."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file) if _usable(cells)]


def _usable(cells: dict[str, str]) -> bool:
    whole = all("?" not in cells[key] for key in ("tensor", "pipeline", "data", "micro_batch", "gpus"))
    return (
        cells["source"] in PROGRAMS
        and cells["gpu"] in DEVICES
        and cells["precision"] == "bf16"
        and cells["tier"] == "1"
        and "FSDP" not in cells["sharding"]
        and whole
        and 8 <= int(cells["gpus"]) <= 512
        and 1e9 <= _parameters(cells) <= 82e9
    )


def _parameters(cells: dict[str, str]) -> float:
    """Matrix parameters from the shape; the names of models round too much."""
    layers, h, ffn = (int(cells[key]) for key in ("layers", "hidden", "ffn"))
    groups = int(cells["kv_heads"]) / int(cells["heads"])
    matrices = 3 if int(cells["gated"]) else 2
    return layers * (h * h * (2 + 2 * groups) + matrices * h * ffn) + 2 * h * int(cells["vocabulary"])


def _row(cells: dict[str, str]) -> Row:
    ffn = int(cells["ffn"]) if int(cells["gated"]) else round(int(cells["ffn"]) * 2 / 3)
    tensor, pipeline = int(cells["tensor"]), int(cells["pipeline"])
    data = int(cells["data"]) * int(cells["context"])
    layers, virtual = int(cells["layers"]), int(cells["virtual"])
    document = {
        "name": cells["id"],
        "workdir": "unused",
        "vocab_size": int(cells["vocabulary"]),
        "patch_size": 1,
        "lm": {
            "head": {"kind": "softmax"},
            "backbone": {
                "num_layers": layers,
                "hidden_size": int(cells["hidden"]),
                "ffn_size": ffn + -ffn % tensor,
                "num_heads": int(cells["heads"]),
                "num_query_groups": int(cells["kv_heads"]),
                "positions": int(cells["sequence"]),
            },
            "training": {
                "steps": 10,
                "global_batch": int(cells["global_batch"]),
                "micro_batch": int(cells["micro_batch"]),
                "precision": "bf16",
                "optimizer": {"lr": 1e-4, "schedule": {"warmup_steps": 1}},
            },
            "parallel": {
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
                "data": data,
                "sequence_parallel": cells["sequence_parallel"] == "on",
                "distributed_optimizer": "ZeRO-0" not in cells["sharding"],
                "recompute": "none",
                "pipeline_layout": _even(layers, pipeline * virtual),
            },
        },
    }
    return Row(
        id=cells["id"],
        source=cells["source"],
        family=cells["family"],
        device=hardware.device(DEVICES[cells["gpu"]]),
        gpus=int(cells["gpus"]),
        config=RunConfig.model_validate(document),
        data_parallel=data,
        measured=float(cells["step_seconds"]),
    )


def _even(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers spread evenly; the first chunks take one more where they do not divide."""
    return tuple(layers // chunks + (1 if index < layers % chunks else 0) for index in range(chunks))
