"""`calm-scale plan`: layouts for a number of nodes, ranked, before anything is queued. No torch."""

from __future__ import annotations

from pathlib import Path

from calm_scale.accounting.report.build import emit
from calm_scale.accounting.report.plan_sections import plan_document
from calm_scale.config import RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.stages.launch import lm_section


def print_plan(
    config: RunConfig,
    *,
    nodes: int,
    gpus_per_node: int,
    gpu: str,
    price: float | None = None,
    json_file: Path | None = None,
) -> int:
    """Print the ranked layouts and the one to take."""
    lm_section(config)
    emit(
        plan_document(config, nodes, gpu, gpus_per_node=gpus_per_node, dollars_per_device_hour=price),
        json_file=json_file,
    )
    return EXIT_OK
