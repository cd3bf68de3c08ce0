"""`calm-scale eval`: BrierLM of a checkpoint on held-out sequences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from calm_scale.checkpoint.card import Card
from calm_scale.config import RunConfig
from calm_scale.config.exit_codes import EXIT_OK
from calm_scale.runtime.world import init_world
from calm_scale.stages.launch import lm_section
from calm_scale.stages.model import open_model
from calm_scale.stages.progress import shown
from calm_scale.stages.readiness import make_ready
from calm_scale.stages.splits import open_split

if TYPE_CHECKING:
    from calm_scale.evaluation.sequences import Crew
    from calm_scale.stages.model import OpenModel
    from data_prep.reading import ShardDataset


def run_evaluation(
    config: RunConfig, *, step: int | None = None, json_file: Path | None = None, tensor: int = 1
) -> int:
    """Score the newest checkpoint (or ``step``); the result goes to ``json_file`` or
    ``<workdir>/eval/step_XXXXXXXX.json``, that of other data or another split into a folder of its own in there.

    Under a launcher the ranks share the sequences; every ``tensor`` consecutive ones hold one model.
    """
    from calm_scale.evaluation.evaluate import evaluate
    from calm_scale.evaluation.report import fallback_warning, save, table
    from calm_scale.evaluation.sequences import Teams
    from calm_scale.sampling.temperature import TemperedModel

    stage = lm_section(config)
    block = stage.backbone.positions * config.patch_size
    dataset = open_split(config, config.evaluation.split, block, partial=True)
    world = init_world()
    try:
        dataset = make_ready(config, dataset, world)
        opened = open_model(config, world, step, tensor)
        crew = world if tensor == 1 else Teams(world, tensor)
        console = Console(quiet=not world.is_first)
        with shown("BrierLM", console) as on_sequence:
            result = evaluate(
                TemperedModel(opened.model, config.evaluation.algorithm, config.evaluation),
                dataset,
                config.evaluation,
                bos_id=dataset.manifest.bos_id if dataset.manifest.add_bos else None,
                pad_id=dataset.manifest.pad_id,
                provenance=opened.provenance(dataset.fingerprint),
                crew=crew,
                on_sequence=on_sequence,
            )
        folder = results_folder(config, opened.card, dataset.fingerprint)
        if world.is_first:
            path = json_file or folder / f"step_{opened.card.step:08d}.json"
            console.print(table(result, title=f"BrierLM · {config.name} at step {opened.card.step}"))
            save(result, path)
            console.print(f"written to {path}", soft_wrap=True, highlight=False)
            if warning := fallback_warning(result):
                Console(stderr=True).print(warning, soft_wrap=True, highlight=False, markup=False)
        if stage.head.kind == "softmax":
            _exact(config, opened, dataset, crew, console, folder if world.is_first else None)
        return EXIT_OK
    finally:
        world.close()


def results_folder(config: RunConfig, card: Card, data_fingerprint: str) -> Path:
    """``<workdir>/eval``, or ``data-<fingerprint>`` in it when this is not the split that the checkpoint's run scores.

    The data of a run are known by their place, so a result of the run's own split takes its name whatever was
    scored before.
    """
    folder = config.workdir / "eval"
    theirs = card.config.get("data")
    own_data = Path(theirs) if theirs else config.workdir / "data"
    own_split = card.config.get("evaluation", {}).get("split", config.evaluation.split)
    if own_data.resolve() == config.data_dir.resolve() and own_split == config.evaluation.split:
        return folder
    return folder / f"data-{data_fingerprint[:8]}"


def _exact(
    config: RunConfig,
    opened: OpenModel,
    dataset: ShardDataset,
    crew: Crew,
    console: Console,
    folder: Path | None,
) -> None:
    """The baseline knows its probabilities: cross-entropy and Brier without sampling noise, beside the estimates.

    ``folder`` is None on all ranks but the first, which writes.
    """
    from calm_scale.evaluation.exact import evaluate_exact

    exact = evaluate_exact(opened.model, dataset, config.evaluation, crew=crew)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"exact_{opened.card.step:08d}.json"
        path.write_text(json.dumps(dataclasses.asdict(exact), indent=1) + "\n", encoding="utf-8")
        console.print(
            f"exact: cross-entropy {exact.cross_entropy:.4f} nats a token; written to {path}", soft_wrap=True
        )


def compare_evaluations(first: Path, second: Path) -> int:
    """The second result against the first, paired by document, with intervals."""
    from calm_scale.evaluation.compare import compare, table
    from calm_scale.evaluation.report import load

    Console().print(table(compare(load(first), load(second))))
    return EXIT_OK
