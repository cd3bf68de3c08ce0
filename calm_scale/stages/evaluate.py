"""`calm-scale eval`: BrierLM of a checkpoint on held-out sequences."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from calm_scale.checkpoint.card import Card
from calm_scale.config import RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.evaluation import protocol_name
from calm_scale.config.files import is_regular, write_output
from calm_scale.config.loading import placed_in
from calm_scale.runtime.departure import joined
from calm_scale.stages.model import open_model
from calm_scale.stages.splits import make_ready, open_split, open_together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calm_scale.config.lm import LMStage
    from calm_scale.evaluation.evaluate import EvaluationResult
    from calm_scale.stages.model import OpenModel
    from data_prep.shards.reading import ShardDataset
    from launchers.ranks import Ranks


def run_evaluation(
    config: RunConfig, *, step: int | None = None, json_file: Path | None = None, tensor: int = 1
) -> int:
    """Score the newest checkpoint (or ``step``); the result goes to ``json_file`` or
    ``<workdir>/eval/step_XXXXXXXX.json``; that of other data, another split or another protocol than the run's own
    goes into a folder of its own in there.
    The baseline's exact scores go beside it, as ``exact_<its name without step_>``.

    Under a launcher the ranks share the sequences; every ``tensor`` consecutive ones hold one model.
    """
    from calm_scale.evaluation.evaluate import evaluate
    from calm_scale.evaluation.report import save
    from calm_scale.evaluation.sequences import Teams
    from calm_scale.sampling.temperature import TemperedModel, check_budget

    check_budget(config.evaluation.algorithm, config.evaluation)
    stage = config.require_lm()
    block = stage.backbone.positions * config.patch_size
    split = config.evaluation.split
    with joined("eval", device=config.device, join_seconds=config.join_minutes * 60) as departure:
        world = departure.world
        dataset = open_together(
            world, config.data_dir / split, lambda: open_split(config, split, block, partial=True)
        )
        dataset = make_ready(config, dataset, world)
        opened = open_model(config, world, step, tensor)
        if world.is_first:
            _say_other_ids(dataset, opened.card)
        crew = world if tensor == 1 else Teams(world, tensor)
        provenance = {**opened.provenance(dataset.fingerprint), **_walk_of(stage), **_text_of(config)}
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
        own_name = folder / f"step_{opened.card.step:08d}.json"
        path = json_file or own_name
        if world.is_first:
            save(result, path)
        exact = None
        if stage.predicts_tokens:
            beside = path if is_regular(path) else own_name
            exact = _exact(config, opened, dataset, crew, provenance, beside if world.is_first else None)
        if world.is_first:  # all is on the disk by now: whoever reads the output may have gone
            _show(result, f"BrierLM · {config.name} at step {opened.card.step}", path, exact)
        return EXIT_OK


def results_folder(config: RunConfig, card: Card, data_fingerprint: str) -> Path:
    """``<workdir>/eval``; in it ``data-<fingerprint>`` for another split than the one the checkpoint's run scores, and
    in either a folder of the protocol's name for another protocol than the run's.

    The run's own is what its checkpoint says. The data of a run are known by their place, so a result of the run's
    own split takes its name whatever was scored before.
    """
    folder = config.folder.evaluations
    run = placed_in(config.workdir, card.config)
    own_data = Path(run["data"]) if run.get("data") else config.folder.data
    own_split = run.get("evaluation", {}).get("split", config.evaluation.split)
    if own_data.resolve() != config.data_dir.resolve() or own_split != config.evaluation.split:
        folder /= f"data-{data_fingerprint[:8]}"
    asked = protocol_name(config.model_dump(mode="json"))
    return folder if asked == protocol_name(run) else folder / asked


def _text_of(config: RunConfig) -> dict[str, str]:
    """The name of the text that is scored, where the document gives it one."""
    return {} if config.evaluation.text is None else {"text": config.evaluation.text}


def _walk_of(stage: LMStage) -> dict[str, str]:
    """The steps that a flow or diffusion head takes to a sample: the document's, which may not be the trained run's."""
    steps = getattr(stage.head, "sampling_steps", None)
    return {} if steps is None else {"sampling_steps": str(steps)}


def _say_other_ids(dataset: ShardDataset, card: Card) -> None:
    """Data of another tokenizer, or of another BOS/EOS policy, are scored as they are; whoever reads it must know."""
    theirs, ours = dataset.manifest.tokenizer_fingerprint, card.tokenizer_fingerprint
    if ours and theirs != ours:
        sys.stderr.write(
            f"note: {dataset.split_dir} was prepared with another tokenizer or BOS/EOS policy (fingerprint {theirs}) "
            f"than the data the model was trained on ({ours})\n"
        )


def _exact(
    config: RunConfig,
    opened: OpenModel,
    dataset: ShardDataset,
    crew: Ranks,
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


def compare_evaluations(first: Path, second: Path, json_file: Path | None = None) -> int:
    """The second result against the first, paired by document, with intervals."""
    from calm_scale.evaluation.compare import compare, table
    from calm_scale.evaluation.report import load

    compared = compare(load(first), load(second))
    if json_file is not None:
        write_output(json_file, json.dumps(asdict(compared), indent=1, allow_nan=False) + "\n")
    Console().print(table(compared))
    return EXIT_OK


LINE_SECONDS = 30.0


@contextlib.contextmanager
def shown(
    title: str, console: Console, line_seconds: float = LINE_SECONDS
) -> Iterator[Callable[[int, int], None]]:
    """A function ``(done, total)`` that shows how far ``title`` is; a quiet console shows nothing."""
    if console.is_terminal and not console.quiet:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(title)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    told = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= line_seconds:
            told = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}", highlight=False, markup=False)

    yield line
