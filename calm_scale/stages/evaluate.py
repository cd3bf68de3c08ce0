"""`calm-scale eval`: BrierLM of a checkpoint on held-out sequences."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from calm_scale.config import RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.runtime.world import init_world
from calm_scale.stages.launch import lm_section
from calm_scale.stages.model import open_model
from calm_scale.stages.splits import open_split


def run_evaluation(config: RunConfig, *, step: int | None = None, json_file: Path | None = None) -> int:
    """Score the newest checkpoint (or ``step``); the result goes to ``<workdir>/eval/step_XXXXXXXX.json``.

    Under a launcher the ranks share the sequences; every rank holds the whole model.
    """
    from calm_scale.evaluation.evaluate import evaluate
    from calm_scale.evaluation.report import save, table

    stage = lm_section(config)
    dataset = open_split(config, config.evaluation.split, stage.backbone.positions * config.patch_size)
    world = init_world()
    try:
        opened = open_model(config, world, step)
        console = Console(quiet=not world.is_first)
        total = min(len(dataset), config.evaluation.max_sequences or len(dataset))
        with Progress(console=console, disable=not (world.is_first and console.is_terminal)) as progress:
            task = progress.add_task("BrierLM", total=total)
            result = evaluate(
                opened.model,
                dataset,
                config.evaluation,
                bos_id=dataset.manifest.bos_id if dataset.manifest.add_bos else None,
                pad_id=dataset.manifest.pad_id,
                provenance=opened.provenance(dataset.fingerprint),
                crew=world,
                on_sequence=lambda done, of: progress.update(task, completed=done, total=of),
            )
        if world.is_first:
            default = config.workdir / "eval" / f"step_{opened.card.step:08d}.json"
            for path in {default, json_file or default}:
                save(result, path)
            console.print(table(result, title=f"BrierLM · {config.name} at step {opened.card.step}"))
            console.print(f"written to {json_file or default}", soft_wrap=True, highlight=False)
        return EXIT_OK
    finally:
        world.close()
