"""The paper's evaluation figures for runs of your own: numbers as JSON, picture as PNG.

    python benchmarks/figures.py temperature RUN.yaml [--baseline AR.yaml] --out DIR     # Figs. 10 and 11
    python benchmarks/figures.py cross-entropy AR.yaml [AR2.yaml ...] --out DIR          # Fig. 3

``temperature`` traces accuracy against collision at T = 1/3 over N, at N = 500 over T, and for a baseline over
softmax temperatures. ``cross-entropy`` scores every complete checkpoint of softmax runs both ways and correlates.
``--set evaluation.max_sequences=16`` and the like make it shorter. What was asked for is checked before anything is
computed: a mistake exits 2, a failure 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from calm_scale.checkpoint.judge import Entry, inventory
from calm_scale.config import CalmScaleError, ConfigError, RunConfig, load
from calm_scale.config.evaluation import GenerationConfig
from calm_scale.config.files import write_atomically
from calm_scale.config.run_folder import Stage
from calm_scale.evaluation.curves import CurvePoint, draw_correlation, draw_curves, trace
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.exact import evaluate_exact
from calm_scale.runtime.world import World, init_world
from calm_scale.sampling.temperature import TemperedModel
from calm_scale.stages.model import open_model
from calm_scale.stages.splits import open_split

CANDIDATES = (1, 10, 30, 100, 200, 500)
INVERSE_TEMPERATURES = (2, 3, 4, 5, 6)
MIN_CHECKPOINTS = 3  # of a correlation
SOFTMAX_TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


class SoftmaxAt:
    """The baseline with its token law sharpened the usual way, p^{1/T} / Z token by token."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.patch_size, self.vocab_size, self.device = 1, model.vocab_size, model.device
        self.hidden, self.begin, self.advance = model.hidden, model.begin, model.advance
        self.sampler = f"softmax, T = {temperature:g}"

    def draw(self, hidden: torch.Tensor, num_samples: int, generator: torch.Generator) -> torch.Tensor:
        law = (self.model.log_probs(hidden) / self.temperature).softmax(-1).flatten(0, -2)
        drawn = torch.multinomial(law, num_samples, replacement=True, generator=generator)
        return drawn.T.reshape(num_samples, *hidden.shape[:-1], 1)


def temperature(config: RunConfig, baseline: RunConfig | None, out: Path, world: World) -> None:
    model = open_model(config, world).model

    def at(t: float, candidates: int) -> TemperedModel:
        settings = GenerationConfig(temperature=t, num_candidates=candidates)
        return TemperedModel(model, "batch", settings)

    most, others = CANDIDATES[-1], [i for i in INVERSE_TEMPERATURES if i != 3]
    over_n = points(config, [(f"N {n}", at(1 / 3, n)) for n in CANDIDATES])
    over_t = points(config, [(f"T 1/{i}", at(1 / i, most)) for i in others])
    over_t.insert(INVERSE_TEMPERATURES.index(3), replace(over_n[-1], label="T 1/3"))  # the point both have
    series = {"CALM, T = 1/3 over N": over_n, f"CALM, N = {most} over T": over_t}
    if baseline is not None:
        softmax = open_model(baseline, world).model
        laws = [(f"{t:g}", SoftmaxAt(softmax, t)) for t in SOFTMAX_TEMPERATURES]
        series["softmax over T"] = points(baseline, laws)
    write(out / "temperature.json", {name: [asdict(p) for p in line] for name, line in series.items()})
    draw_curves(series, out / "temperature.png")


def points(config: RunConfig, models: Sequence[tuple[str, Any]]) -> list[CurvePoint]:
    data = dataset_of(config)
    show = lambda p: print(f"  {p.label}: accuracy {p.accuracy:.3f} %, collision {p.collision:.3f} %")  # noqa: E731
    return trace(models, data, config.evaluation, on_point=show, bos_id=data.manifest.bos_id)


def cross_entropy(configs: Sequence[RunConfig], out: Path, world: World) -> None:
    rows = [row for config in configs for row in scored_checkpoints(config, world)]
    write(out / "cross_entropy.json", rows)
    nats, scores = [r["cross_entropy"] for r in rows], [r["brierlm"] for r in rows]
    result = draw_correlation(nats, scores, out / "cross_entropy.png", [r["run"] for r in rows])
    print(f"pearson: {result.pearson:.3f}\nspearman: {result.spearman:.3f}\ncheckpoints: {result.num_points}")
    if left_out := len(rows) - result.num_points:
        print(f"undefined_brierlm: {left_out}")


def scored_checkpoints(config: RunConfig, world: World) -> Iterator[dict[str, Any]]:
    data = dataset_of(config)
    for entry in complete_checkpoints(config):
        model = open_model(config, world, entry.step).model
        exact = evaluate_exact(model, data, config.evaluation)
        sampled = evaluate(model, data, config.evaluation, bos_id=data.manifest.bos_id).score
        shown = "undefined" if sampled.brierlm is None else f"{sampled.brierlm:.3f}"
        print(
            f"  {config.name} step {entry.step}: {exact.cross_entropy:.4f} nats, BrierLM {shown}", flush=True
        )
        yield {
            "run": config.name,
            "step": entry.step,
            "cross_entropy": exact.cross_entropy,
            "brierlm": sampled.brierlm,
            "components": sampled.components,
            "exact_components": exact.components,
        }


def complete_checkpoints(config: RunConfig) -> list[Entry]:
    return [entry for entry in inventory(config.folder.stage(Stage.LM).path) if entry.state == "complete"]


def dataset_of(config: RunConfig) -> Any:
    block = config.require_lm().backbone.positions * config.patch_size
    return open_split(config, config.evaluation.split, block, partial=True)


def write(path: Path, document: Any) -> None:
    write_atomically(path, json.dumps(document, indent=1) + "\n")
    print(f"  {path}")


def checked_temperature(configs: Sequence[RunConfig], baseline: RunConfig | None) -> RunConfig:
    """The one CALM of the figure. Raises ConfigError for what cannot be traced, before anything is."""
    if len(configs) > 1:
        raise ConfigError(
            f"temperature traces one run, {len(configs)} are named; name an autoregressive one with --baseline"
        )
    if baseline is not None:
        refuse_unless_softmax(baseline, "--baseline")
    for config in (*configs, *([baseline] if baseline else [])):
        dataset_of(config)
        if not complete_checkpoints(config):
            raise ConfigError(
                f"{config.workdir / 'lm'}: no complete checkpoint; train run {config.name} first"
            )
    return configs[0]


def check_cross_entropy(configs: Sequence[RunConfig], baseline: Path | None) -> None:
    """Raises ConfigError for runs without a cross-entropy, and for too few checkpoints to correlate."""
    if baseline is not None:
        raise ConfigError(
            "cross-entropy takes no --baseline: name every autoregressive run as a configuration"
        )
    for config in configs:
        refuse_unless_softmax(config, "cross-entropy")
        dataset_of(config)
    found = {str(config.folder.stage(Stage.LM).path): len(complete_checkpoints(config)) for config in configs}
    if sum(found.values()) < MIN_CHECKPOINTS:
        counts = ", ".join(f"{place}: {count}" for place, count in found.items())
        raise ConfigError(
            f"cross-entropy correlates at least {MIN_CHECKPOINTS} complete checkpoints, there are {counts}; train on, "
            "with a smaller lm.training.checkpoint.interval or a larger keep_last, or name more runs"
        )


def refuse_unless_softmax(config: RunConfig, what: str) -> None:
    kind = config.require_lm().head.kind
    if kind != "softmax":
        raise ConfigError(f"{what} needs an autoregressive run (head softmax), {config.name} has head {kind}")


def prepare_folder(out: Path) -> None:
    """Makes the folder of the results, so that what is in its way is told before they are computed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: no folder can be made there: {error.strerror}; name another"
        ) from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: is not writable; name another folder")


def main() -> int:
    """Draws what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("temperature", "cross-entropy"))
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    try:
        draw(parser.parse_args())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (CalmScaleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw(asked: argparse.Namespace) -> None:
    """Everything is loaded and checked before the first number is computed."""
    configs = [load(path, asked.overrides) for path in asked.configs]
    if asked.figure == "temperature":
        baseline = load(asked.baseline, asked.overrides) if asked.baseline else None
        config = checked_temperature(configs, baseline)
        prepare_folder(asked.out)
        temperature(config, baseline, asked.out, init_world())
    else:
        check_cross_entropy(configs, asked.baseline)
        prepare_folder(asked.out)
        cross_entropy(configs, asked.out, init_world())


if __name__ == "__main__":
    sys.exit(main())
