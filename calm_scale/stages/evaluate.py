"""`calm-scale eval`: BrierLM of a checkpoint on held-out sequences."""

from __future__ import annotations

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
    from collections.abc import Mapping

    from calm_scale.config.lm import LMStage
    from calm_scale.evaluation.evaluate import EvaluationResult
    from calm_scale.evaluation.sequences import Crew
    from calm_scale.stages.model import OpenModel
    from data_prep.reading import ShardDataset


def run_evaluation(
    config: RunConfig, *, step: int | None = None, json_file: Path | None = None, tensor: int = 1
) -> int:
    """Score the newest checkpoint (or ``step``); the result goes to ``json_file`` or
    ``<workdir>/eval/step_XXXXXXXX.json``, that of other data or another split into a folder of its own in there.
    The baseline's exact scores go beside it, as ``exact_<its name without step_>``.

    Under a launcher the ranks share the sequences; every ``tensor`` consecutive ones hold one model.
    """
    from calm_scale.evaluation.evaluate import evaluate
    from calm_scale.evaluation.report import save
    from calm_scale.evaluation.sequences import Teams
    from calm_scale.sampling.temperature import TemperedModel, check_budget

    check_budget(config.evaluation.algorithm, config.evaluation)
    stage = lm_section(config)
    block = stage.backbone.positions * config.patch_size
    dataset = open_split(config, config.evaluation.split, block, partial=True)
    world = init_world()
    try:
        dataset = make_ready(config, dataset, world)
        opened = open_model(config, world, step, tensor)
        crew = world if tensor == 1 else Teams(world, tensor)
        provenance = {**opened.provenance(dataset.fingerprint), **_walk_of(stage)}
        with shown("BrierLM", Console(stderr=True, quiet=not world.is_first)) as on_sequence:
            result = evaluate(
                TemperedModel(opened.model, config.evaluation.algorithm, config.evaluation),
                dataset,
                config.evaluation,
                bos_id=dataset.manifest.bos_id if dataset.manifest.add_bos else None,
                pad_id=dataset.manifest.pad_id,
                provenance=provenance,
                crew=crew,
                on_sequence=on_sequence,
            )
        folder = results_folder(config, opened.card, dataset.fingerprint)
        path = json_file or folder / f"step_{opened.card.step:08d}.json"
        if world.is_first:
            save(result, path)
        exact = None
        if stage.head.kind == "softmax":
            exact = _exact(config, opened, dataset, crew, provenance, path if world.is_first else None)
        if world.is_first:  # all is on the disk by now: whoever reads the output may have gone
            _show(result, f"BrierLM · {config.name} at step {opened.card.step}", path, exact)
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


def _walk_of(stage: LMStage) -> dict[str, str]:
    """The steps that a flow or diffusion head takes to a sample: the document's, which may not be the trained run's."""
    steps = getattr(stage.head, "sampling_steps", None)
    return {} if steps is None else {"sampling_steps": str(steps)}


def _exact(
    config: RunConfig,
    opened: OpenModel,
    dataset: ShardDataset,
    crew: Crew,
    provenance: Mapping[str, str],
    beside: Path | None,
) -> str:
    """The baseline knows its probabilities: cross-entropy and Brier without sampling noise, beside the estimates.

    ``beside``: the estimates' file on the rank that writes, None on the others. Returns what to tell the user.
    """
    from calm_scale.evaluation.exact import evaluate_exact, exact_protocol
    from calm_scale.evaluation.report import save_exact

    exact = evaluate_exact(opened.model, dataset, config.evaluation, crew=crew)
    told = f"exact: cross-entropy {exact.cross_entropy:.4f} nats a token"
    if beside is None:
        return told
    path = beside.with_name(f"exact_{beside.name.removeprefix('step_')}")
    save_exact(exact, exact_protocol(opened.model, dataset, config.evaluation, provenance), path)
    return f"{told}; written to {path}"


def _show(result: EvaluationResult, title: str, path: Path, exact: str | None) -> None:
    from calm_scale.evaluation.report import fallback_warning, table

    console = Console()
    console.print(table(result, title=title))
    for line in (f"written to {path}", exact):
        if line:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    if warning := fallback_warning(result):
        Console(stderr=True).print(warning, soft_wrap=True, highlight=False, markup=False)


def compare_evaluations(first: Path, second: Path) -> int:
    """The second result against the first, paired by document, with intervals."""
    from calm_scale.evaluation.compare import compare, table
    from calm_scale.evaluation.report import load

    Console().print(table(compare(load(first), load(second))))
    return EXIT_OK
