"""The paper's evaluation figures for runs of your own: numbers as JSON, picture as PNG.

    python benchmarks/figures.py temperature RUN.yaml [--baseline AR.yaml] --out DIR     # Figs. 10 and 11
    python benchmarks/figures.py cross-entropy AR.yaml [AR2.yaml ...] --out DIR          # Fig. 3

``temperature`` traces accuracy against collision at T = 1/3 over N, at N = 500 over T, and for a baseline over
softmax temperatures. ``cross-entropy`` scores every complete checkpoint of softmax runs both ways and correlates.
``--set evaluation.max_sequences=16`` and the like make it shorter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from calm_scale.checkpoint.inventory import inventory
from calm_scale.config import RunConfig, load
from calm_scale.config.evaluation import GenerationConfig
from calm_scale.evaluation.curves import CurvePoint, draw_correlation, draw_curves, trace
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.exact import evaluate_exact
from calm_scale.runtime.world import World, init_world
from calm_scale.sampling.temperature import TemperedModel
from calm_scale.stages.model import open_model
from calm_scale.stages.splits import open_split

CANDIDATES = (1, 10, 30, 100, 200, 500)
INVERSE_TEMPERATURES = (2, 3, 4, 5, 6)
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

    over_n = [(f"N {n}", at(1 / 3, n)) for n in CANDIDATES]
    over_t = [(f"T 1/{i}", at(1 / i, CANDIDATES[-1])) for i in INVERSE_TEMPERATURES]
    series = {
        "CALM, T = 1/3 over N": points(config, over_n),
        f"CALM, N = {CANDIDATES[-1]} over T": points(config, over_t),
    }
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
    for entry in inventory(config.workdir / "lm"):
        if entry.state == "complete":
            model = open_model(config, world, entry.step).model
            exact = evaluate_exact(model, data, config.evaluation)
            sampled = evaluate(model, data, config.evaluation, bos_id=data.manifest.bos_id).score
            shown = "undefined" if sampled.brierlm is None else f"{sampled.brierlm:.3f}"
            print(
                f"  {config.name} step {entry.step}: {exact.cross_entropy:.4f} nats, BrierLM {shown}",
                flush=True,
            )
            yield {
                "run": config.name,
                "step": entry.step,
                "cross_entropy": exact.cross_entropy,
                "brierlm": sampled.brierlm,
                "components": sampled.components,
                "exact_components": exact.components,
            }


def dataset_of(config: RunConfig) -> Any:
    if config.lm is None:
        raise SystemExit(f"{config.name} has no lm section")
    block = config.lm.backbone.positions * config.patch_size
    return open_split(config, config.evaluation.split, block, partial=True)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"  {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("temperature", "cross-entropy"))
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    configs = [load(path, asked.overrides) for path in asked.configs]
    world = init_world()
    if asked.figure == "temperature":
        baseline = load(asked.baseline, asked.overrides) if asked.baseline else None
        temperature(configs[0], baseline, asked.out, world)
    else:
        cross_entropy(configs, asked.out, world)


if __name__ == "__main__":
    main()
